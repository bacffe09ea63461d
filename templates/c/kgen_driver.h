/* The CUDA driver, loaded at its first use, without CUDA headers or libraries at build time. Needs POSIX.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KGEN_DRIVER_H
#define KGEN_DRIVER_H

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "kgen.h"

#ifdef __cplusplus
#define KGEN_THREAD thread_local
#else
#define KGEN_THREAD _Thread_local
#endif

/* --- errors ------------------------------------------------------------------------------------------------------- */

static KGEN_THREAD char kgen_message[512];

static inline int kgen_fail(int status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(kgen_message, sizeof kgen_message, format, arguments);
    va_end(arguments);
    return status;
}

#define KGEN_TRY(call)                \
    do {                              \
        int kgen_status = (call);     \
        if (kgen_status != KGEN_OK) { \
            return kgen_status;       \
        }                             \
    } while (0)

/* --- the driver --------------------------------------------------------------------------------------------------- */

/* Structures and numbers of the driver's public API. */
typedef struct {
    int id;
    char pad[4];
    int value[16];
} kgen_attribute;

typedef struct {
    unsigned int grid[3], block[3], shared;
    CUstream stream;
    kgen_attribute *attributes;
    unsigned int count;
} kgen_config;

typedef struct {
    size_t from_x, from_y;
    int from_type;
    const void *from_host;
    unsigned long long from_device;
    void *from_array;
    size_t from_pitch;
    size_t to_x, to_y;
    int to_type;
    void *to_host;
    unsigned long long to_device;
    void *to_array;
    size_t to_pitch;
    size_t width, height;
} kgen_copy;

enum {
    KGEN_ON_DEVICE = 2,
    KGEN_MULTIPROCESSORS = 16,
    KGEN_MAJOR = 75,
    KGEN_MINOR = 76,
    KGEN_DYNAMIC_SHARED = 8,
    KGEN_COOPERATIVE = 2,
    KGEN_PROGRAMMATIC = 6,
    KGEN_L2_128_BYTES = 2,
    KGEN_MAP_BYTES = 128,
    KGEN_MAP_DIMS = 5
};

static struct {
    int (*cuGetErrorString)(int, const char **);
    int (*cuCtxGetCurrent)(void **);
    int (*cuCtxGetId)(void *, unsigned long long *);
    int (*cuCtxGetDevice)(int *);
    int (*cuDeviceGetAttribute)(int *, int, int);
    int (*cuModuleLoadData)(void **, const void *);
    int (*cuModuleGetFunction)(void **, void *, const char *);
    int (*cuFuncSetAttribute)(void *, int, int);
    int (*cuLaunchKernelEx)(const kgen_config *, void *, void **, void **);
    int (*cuMemsetD16Async)(unsigned long long, unsigned short, size_t, CUstream);
    int (*cuMemsetD32Async)(unsigned long long, unsigned int, size_t, CUstream);
    int (*cuMemcpy2DAsync)(const kgen_copy *, CUstream);
    int (*cuTensorMapEncodeTiled)(void *, int, unsigned int, void *, const uint64_t *, const uint64_t *,
                                  const uint32_t *, const uint32_t *, int, int, int, int);
} kgen_cu;

static pthread_once_t kgen_once = PTHREAD_ONCE_INIT;
static const char *kgen_missing;

/* Look up a function. C has no conversion from data pointers to function pointers, hence memcpy. */
static inline void kgen_symbol(void *library, const char *name, void *function, int needed)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    if (!found && needed) {
        kgen_missing = name;
    }
}

static inline void kgen_find_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        kgen_missing = "libcuda.so.1";
        return;
    }
    kgen_symbol(library, "cuGetErrorString", &kgen_cu.cuGetErrorString, 1);
    kgen_symbol(library, "cuCtxGetCurrent", &kgen_cu.cuCtxGetCurrent, 1);
    kgen_symbol(library, "cuCtxGetId", &kgen_cu.cuCtxGetId, 0);
    kgen_symbol(library, "cuCtxGetDevice", &kgen_cu.cuCtxGetDevice, 1);
    kgen_symbol(library, "cuDeviceGetAttribute", &kgen_cu.cuDeviceGetAttribute, 1);
    kgen_symbol(library, "cuModuleLoadData", &kgen_cu.cuModuleLoadData, 1);
    kgen_symbol(library, "cuModuleGetFunction", &kgen_cu.cuModuleGetFunction, 1);
    kgen_symbol(library, "cuFuncSetAttribute", &kgen_cu.cuFuncSetAttribute, 1);
    kgen_symbol(library, "cuLaunchKernelEx", &kgen_cu.cuLaunchKernelEx, 1);
    kgen_symbol(library, "cuMemsetD16Async", &kgen_cu.cuMemsetD16Async, 1);
    kgen_symbol(library, "cuMemsetD32Async", &kgen_cu.cuMemsetD32Async, 1);
    kgen_symbol(library, "cuMemcpy2DAsync_v2", &kgen_cu.cuMemcpy2DAsync, 1);
    /* From CUDA 12, and optional: only some kernels use it. */
    kgen_symbol(library, "cuTensorMapEncodeTiled", &kgen_cu.cuTensorMapEncodeTiled, 0);
}

static inline int kgen_checked(int error, const char *call)
{
    const char *words = NULL;
    if (!error) {
        return KGEN_OK;
    }
    kgen_cu.cuGetErrorString(error, &words);
    return kgen_fail(KGEN_DRIVER, "%s: %s (%d)", call, words ? words : "unknown error", error);
}

#define KGEN_CU(call, ...) KGEN_TRY(kgen_checked(kgen_cu.call(__VA_ARGS__), #call))

/* The current context, and the compute capability (90 for 9.0) and number of multiprocessors of its device. */
typedef struct {
    unsigned long long context;
    int arch, multiprocessors;
} kgen_device;

static inline int kgen_current(kgen_device *device)
{
    void *context = NULL;
    int number = 0, major = 0, minor = 0;
    pthread_once(&kgen_once, kgen_find_driver);
    if (kgen_missing) {
        return kgen_fail(KGEN_DRIVER, "no CUDA driver: %s was not found", kgen_missing);
    }
    KGEN_CU(cuCtxGetCurrent, &context);
    if (!context) {
        return kgen_fail(KGEN_DRIVER,
                         "no CUDA context is current in this thread: call cudaSetDevice or cuCtxSetCurrent");
    }
    /* The driver reuses addresses of contexts, but not their ids. */
    memcpy(&device->context, &context, sizeof context);
    if (kgen_cu.cuCtxGetId) {
        KGEN_CU(cuCtxGetId, context, &device->context);
    }
    KGEN_CU(cuCtxGetDevice, &number);
    KGEN_CU(cuDeviceGetAttribute, &major, KGEN_MAJOR, number);
    KGEN_CU(cuDeviceGetAttribute, &minor, KGEN_MINOR, number);
    KGEN_CU(cuDeviceGetAttribute, &device->multiprocessors, KGEN_MULTIPROCESSORS, number);
    device->arch = 10 * major + minor;
    return KGEN_OK;
}

#endif
