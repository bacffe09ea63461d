/* Simulated CUDA driver. It launches nothing and passes each call to functions of the test. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int (*load_function)(void **module, const void *image);
typedef int (*launch_function)(const void *config, void *function, void **parameters);
typedef int (*set_function)(unsigned long long address, unsigned int value, size_t count, void *stream);
typedef int (*copy_function)(const void *copy, void *stream);

static load_function load;
static launch_function launch;
static set_function set;
static copy_function copy;
static int major = 8, minor = 0, multiprocessors = 1, failing;
static _Thread_local void *context = (void *)1;

void paper_calls(load_function l, launch_function k, set_function s, copy_function c)
{
    load = l, launch = k, set = s, copy = c;
}

void paper_device(int arch, int count)
{
    major = arch / 10, minor = arch % 10, multiprocessors = count;
}

void paper_context(void *current)
{
    context = current;
}

void paper_fail(int error)
{
    failing = error;
}

/* --- memory, as garbage --------------------------------------------------------------------------------------------- */

enum { ALLOCATIONS = 1024 };
static struct {
    uintptr_t begin, end;
} allocations[ALLOCATIONS];

/* Return the end of the allocation that contains an address, or 0. */
unsigned long long paper_end(unsigned long long address)
{
    for (int i = 0; i < ALLOCATIONS; i++) {
        if (address >= allocations[i].begin && address < allocations[i].end) {
            return allocations[i].end;
        }
    }
    return 0;
}

int cuMemAlloc_v2(unsigned long long *address, size_t bytes)
{
    void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    for (int i = 0; memory && i < ALLOCATIONS; i++) {
        if (!allocations[i].begin) {
            allocations[i].begin = (uintptr_t)memory;
            allocations[i].end = (uintptr_t)memory + bytes;
            *address = (uintptr_t)memory;
            memset(memory, 0x7f, bytes);
            return 0;
        }
    }
    return 2;
}

int cuMemFree_v2(unsigned long long address)
{
    for (int i = 0; i < ALLOCATIONS; i++) {
        if (allocations[i].begin == address) {
            allocations[i].begin = allocations[i].end = 0;
            free((void *)(uintptr_t)address);
            return 0;
        }
    }
    return 1;
}

int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes)
{
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes)
{
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return 0;
}

/* --- a device ------------------------------------------------------------------------------------------------------- */

int cuInit(unsigned int flags)
{
    return flags != 0;
}

int cuDeviceGet(int *device, int number)
{
    *device = number;
    return number != 0;
}

int cuDevicePrimaryCtxRetain(void **found, int device)
{
    *found = (void *)1;
    return device != 0;
}

int cuCtxSetCurrent(void *current)
{
    context = current;
    return 0;
}

int cuCtxSynchronize(void)
{
    return 0;
}

int cuGetErrorString(int error, const char **words)
{
    *words = error == 700 ? "on paper" : 0;
    return 0;
}

int cuCtxGetCurrent(void **current)
{
    *current = context;
    return 0;
}

int cuCtxGetDevice(int *device)
{
    *device = 0;
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = attribute == 16 ? multiprocessors : attribute == 75 ? major : attribute == 76 ? minor : -1;
    return device ? 101 : 0;
}

int cuModuleLoadData(void **module, const void *image)
{
    return load(module, image);
}

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    *function = module;
    return name[0] != '_';
}

int cuFuncSetAttribute(void *function, int attribute, int value)
{
    return !function || attribute != 8 || value <= 48 * 1024;
}

int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra)
{
    return failing ? failing : extra ? 1 : launch(config, function, parameters);
}

int cuMemsetD16Async(unsigned long long address, unsigned short value, size_t count, void *stream)
{
    if (address % 2 || value || stream) {
        return 1;
    }
    memset((void *)(uintptr_t)address, 0, 2 * count);
    return 0;
}

int cuMemsetD32Async(unsigned long long address, unsigned int value, size_t count, void *stream)
{
    return set(address, value, count, stream);
}

int cuMemcpy2DAsync_v2(const void *asked, void *stream)
{
    return copy(asked, stream);
}

/* The map holds its arguments, with the address first. */
int cuTensorMapEncodeTiled(void *map, int type, unsigned int rank, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const uint32_t *block, const uint32_t *steps, int interleave, int swizzle,
                           int promotion, int fill)
{
    unsigned char *to = (unsigned char *)map;
    unsigned char head[8] = {(unsigned char)type, (unsigned char)rank, (unsigned char)interleave, (unsigned char)swizzle,
                             (unsigned char)promotion, (unsigned char)fill, 0, 0};
    if ((uintptr_t)map % 64 || (uintptr_t)address % 16 || rank > 5) {
        return 1;
    }
    for (unsigned int i = 0; i < rank; i++) {
        head[6] |= steps[i] != 1;
    }
    memset(map, 0, 128);
    memcpy(to, &address, 8);
    memcpy(to + 8, head, 8);
    memcpy(to + 16, sizes, 8 * rank);
    memcpy(to + 56, strides, 8 * (rank - 1));
    memcpy(to + 88, block, 4 * rank);
    return 0;
}
