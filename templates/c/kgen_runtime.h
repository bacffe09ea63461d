/* Find machine code by named arguments, and launch it. The source of each package includes this file once.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KGEN_RUNTIME_H
#define KGEN_RUNTIME_H

#include "kgen_driver.h"

/* --- arguments ---------------------------------------------------------------------------------------------------- */

enum { KGEN_NOTHING, KGEN_INTEGER, KGEN_REAL, KGEN_POINTER, KGEN_TILES };
enum { KGEN_BF16, KGEN_FP16, KGEN_FP32, KGEN_FP64, KGEN_FP8E4NV, KGEN_U8, KGEN_I8, KGEN_I16, KGEN_I32, KGEN_I64,
       KGEN_I1 };

/* A tensor for a TMA descriptor, and the tile that a kernel reads of it. */
typedef struct {
    const void *data;
    int dtype, rank;
    int64_t sizes[KGEN_MAP_DIMS], strides[KGEN_MAP_DIMS];
    int32_t tile[KGEN_MAP_DIMS];
} kgen_tiles;

typedef struct {
    int kind, dtype;
    union {
        int64_t integer;
        double real;
        const void *pointer;
        const kgen_tiles *tiles;
    } is;
} kgen_value;

static inline kgen_value kgen_nothing(void)
{
    kgen_value value;
    memset(&value, 0, sizeof value);
    return value;
}

static inline kgen_value kgen_integer(int64_t number)
{
    kgen_value value = kgen_nothing();
    value.kind = KGEN_INTEGER;
    value.is.integer = number;
    return value;
}

static inline kgen_value kgen_real(double number)
{
    kgen_value value = kgen_nothing();
    value.kind = KGEN_REAL;
    value.is.real = number;
    return value;
}

/* The pointer of an empty tensor may be NULL. */
static inline kgen_value kgen_pointer(const void *pointer, int dtype)
{
    kgen_value value = kgen_nothing();
    value.kind = KGEN_POINTER;
    value.dtype = dtype;
    value.is.pointer = pointer;
    return value;
}

/* Return nothing if there is no tensor. */
static inline kgen_value kgen_optional(const void *pointer, int dtype)
{
    return pointer ? kgen_pointer(pointer, dtype) : kgen_nothing();
}

static inline kgen_value kgen_described(const kgen_tiles *tiles)
{
    kgen_value value = kgen_nothing();
    value.kind = KGEN_TILES;
    value.dtype = tiles->dtype;
    value.is.tiles = tiles;
    return value;
}

/* The names of the strides of a tensor are consecutive. */
static inline void kgen_strides(kgen_value *values, const kgen_tensor *x, int rank)
{
    for (int i = 0; i < rank; i++) {
        values[i] = kgen_integer(x->strides[i]);
    }
}

/* --- machine code ------------------------------------------------------------------------------------------------- */

/* An argument of a kernel, by name: its kind, or a constant. An `aligned` argument is a multiple of 16. `bits` is the
 * width of an integer. `map` is the index of a TMA descriptor's parameters among the parameters of the kernel. */
typedef struct {
    short name;
    signed char constant, kind, dtype, aligned, bits, map;
    int64_t integer;
    double real;
} kgen_argument;

/* The tiles of a TMA descriptor. TMA moves a tile in one or more blocks. */
typedef struct {
    int element_type, element_size, swizzle, rank;
    int32_t tile[KGEN_MAP_DIMS], block[KGEN_MAP_DIMS];
} kgen_map;

typedef struct {
    int kernel, arch;
    const void *image;
    const char *symbol;
    unsigned int threads, shared;
    int programmatic, cooperative;
    int count;
    const kgen_argument *arguments;
    const kgen_map *maps;
} kgen_cubin;

enum { KGEN_CONTEXTS = 32, KGEN_PARAMETERS = 160, KGEN_MAPS = 16 };

/* A package: machine code, for each kernel the most specialized first. Each context has `count` entries for its loaded
 * functions. `hint` tells a user what to do if no machine code fits. */
typedef struct {
    const char *name, *hint;
    const char *const *kernels;
    const kgen_cubin *cubins;
    int count;
    void **functions;
    unsigned long long contexts[KGEN_CONTEXTS];
    int used, next;
    pthread_mutex_t mutex;
} kgen_library;

static inline int kgen_argument_fits(const kgen_argument *wanted, const kgen_map *maps, const kgen_value *given)
{
    if (wanted->constant) {
        return given->kind == wanted->kind
               && (wanted->kind == KGEN_NOTHING
                   || (wanted->kind == KGEN_REAL ? given->is.real == wanted->real
                                               : given->is.integer == wanted->integer));
    }
    if (given->kind != wanted->kind) {
        return 0;
    }
    switch (wanted->kind) {
    case KGEN_TILES: {
        const kgen_tiles *tiles = given->is.tiles;
        const kgen_map *map = &maps[wanted->map];
        return tiles->dtype == wanted->dtype && tiles->rank == map->rank
               && !memcmp(tiles->tile, map->tile, (size_t)map->rank * sizeof map->tile[0]);
    }
    case KGEN_POINTER:
        return given->dtype == wanted->dtype && !(wanted->aligned && (uintptr_t)given->is.pointer % 16);
    case KGEN_INTEGER: {
        int64_t most = (int64_t)(((uint64_t)1 << (wanted->bits - 1)) - 1);
        return given->is.integer <= most && given->is.integer >= -most - 1
               && !(wanted->aligned && given->is.integer % 16);
    }
    default:
        return 1;
    }
}

static inline const kgen_cubin *kgen_fitting(const kgen_library *library, int kernel, int arch,
                                              const kgen_value *values)
{
    for (int i = 0; i < library->count; i++) {
        const kgen_cubin *cubin = &library->cubins[i];
        int fits = cubin->kernel == kernel && cubin->arch == arch;
        for (int j = 0; fits && j < cubin->count; j++) {
            const kgen_argument *wanted = &cubin->arguments[j];
            fits = kgen_argument_fits(wanted, cubin->maps, &values[wanted->name]);
        }
        if (fits) {
            return cubin;
        }
    }
    return NULL;
}

/* Load a kernel into the current context if needed. The caller holds the lock of the library. */
static inline int kgen_load_locked(kgen_library *library, const kgen_cubin *cubin, const kgen_device *device,
                                   void **function)
{
    int slot = 0;
    void *module = NULL;
    while (slot < library->used && library->contexts[slot] != device->context) {
        slot++;
    }
    if (slot == library->used) {
        if (library->used < KGEN_CONTEXTS) {
            library->used++;
        } else { /* most older contexts are destroyed */
            slot = library->next;
            library->next = (slot + 1) % KGEN_CONTEXTS;
        }
        library->contexts[slot] = device->context;
        memset(&library->functions[slot * library->count], 0, (size_t)library->count * sizeof library->functions[0]);
    }
    void **place = &library->functions[slot * library->count + (cubin - library->cubins)];
    if (!*place) {
        void *found = NULL;
        KGEN_CU(cuModuleLoadData, &module, cubin->image);
        KGEN_CU(cuModuleGetFunction, &found, module, cubin->symbol);
        if (cubin->shared > 48 * 1024) {
            KGEN_CU(cuFuncSetAttribute, found, KGEN_DYNAMIC_SHARED, (int)cubin->shared);
        }
        *place = found;
    }
    *function = *place;
    return KGEN_OK;
}

static inline int kgen_load(kgen_library *library, const kgen_cubin *cubin, const kgen_device *device, void **function)
{
    pthread_mutex_lock(&library->mutex);
    int status = kgen_load_locked(library, cubin, device, function);
    pthread_mutex_unlock(&library->mutex);
    return status;
}

/* Load all machine code for the current device. */
static inline int kgen_load_all(kgen_library *library)
{
    kgen_device device;
    int found = 0;
    KGEN_TRY(kgen_current(&device));
    for (int i = 0; i < library->count; i++) {
        if (library->cubins[i].arch == device.arch) {
            void *function;
            KGEN_TRY(kgen_load(library, &library->cubins[i], &device, &function));
            found = 1;
        }
    }
    return found ? KGEN_OK : kgen_fail(KGEN_NO_KERNEL, "%s: no machine code for sm_%d", library->name, device.arch);
}

/* --- launches ----------------------------------------------------------------------------------------------------- */

/* Encode a TMA descriptor. TMA counts dimensions from the last one, which is contiguous. */
static inline int kgen_encode(void *to, const kgen_map *map, const kgen_tiles *x)
{
    uint64_t sizes[KGEN_MAP_DIMS], steps[KGEN_MAP_DIMS];
    uint32_t block[KGEN_MAP_DIMS], ones[KGEN_MAP_DIMS];
    for (int i = 0; i < map->rank; i++) {
        int from = map->rank - 1 - i;
        sizes[i] = (uint64_t)x->sizes[from];
        block[i] = (uint32_t)map->block[from];
        ones[i] = 1;
        if (from) {
            steps[i] = (uint64_t)x->strides[from - 1] * (uint64_t)map->element_size;
        }
    }
    if (!kgen_cu.cuTensorMapEncodeTiled) {
        return kgen_fail(KGEN_DRIVER, "the CUDA driver is too old: cuTensorMapEncodeTiled was not found");
    }
    KGEN_CU(cuTensorMapEncodeTiled, to, map->element_type, (unsigned int)map->rank, (void *)(uintptr_t)x->data, sizes,
            steps, block, ones, 0, map->swizzle, KGEN_L2_128_BYTES, 0);
    return KGEN_OK;
}

/* Fail with the reason why no machine code fits a launch. */
static inline int kgen_fits_none(const kgen_library *library, int kernel, int arch)
{
    for (int i = 0; i < library->count; i++) {
        if (library->cubins[i].arch == arch) {
            return kgen_fail(KGEN_NO_KERNEL, "%s: no machine code of %s for sm_%d and these arguments: %s",
                             library->name, library->kernels[kernel], arch, library->hint);
        }
    }
    return kgen_fail(KGEN_NO_KERNEL, "%s: no machine code for sm_%d. Build it with `kgen build --arch`",
                     library->name, arch);
}

/* Check that machine code fits a launch. A pass that updates a tensor in place checks its last kernel first. */
static inline int kgen_check_launch(const kgen_library *library, int kernel, const kgen_device *device,
                                    const kgen_value *values, int64_t programs)
{
    if (programs == 0 || kgen_fitting(library, kernel, device->arch, values)) {
        return KGEN_OK;
    }
    return kgen_fits_none(library, kernel, device->arch);
}

/* Launch the first machine code that fits `values`, an array by name. Without programs, launch nothing. */
static inline int kgen_launch(kgen_library *library, int kernel, const kgen_device *device, const kgen_value *values,
                              int64_t programs, CUstream stream)
{
    union {
        int64_t integer;
        int32_t narrow;
        int16_t half;
        int8_t byte;
        float real;
        const void *pointer;
    } numbers[KGEN_PARAMETERS];
    char memory[(KGEN_MAPS + 1) * KGEN_MAP_BYTES];
    char *maps = memory + (KGEN_MAP_BYTES - (uintptr_t)memory % KGEN_MAP_BYTES);
    void *parameters[KGEN_PARAMETERS], *function = NULL;
    kgen_attribute attributes[2];
    kgen_config config;
    const kgen_cubin *cubin;
    int n = 0;
    if (programs == 0) {
        return KGEN_OK;
    }
    if (programs > INT32_MAX) {
        return kgen_fail(KGEN_INVALID, "%s: a grid may have at most 2**31 - 1 programs, got %lld", library->name,
                         (long long)programs);
    }
    cubin = kgen_fitting(library, kernel, device->arch, values);
    if (!cubin) {
        return kgen_fits_none(library, kernel, device->arch);
    }
    KGEN_TRY(kgen_load(library, cubin, device, &function));
    for (int i = 0; i < cubin->count; i++) {
        const kgen_argument *wanted = &cubin->arguments[i];
        const kgen_value *given = &values[wanted->name];
        if (wanted->constant) {
            continue;
        }
        parameters[n] = &numbers[n];
        switch (wanted->kind) {
        case KGEN_TILES: {
            const kgen_tiles *tiles = given->is.tiles;
            KGEN_TRY(kgen_encode(maps, &cubin->maps[wanted->map], tiles));
            parameters[n++] = maps;
            maps += KGEN_MAP_BYTES;
            for (int j = 0; j < 2 * tiles->rank; j++) {
                parameters[n] = &numbers[n];
                if (j < tiles->rank) {
                    numbers[n++].narrow = (int32_t)tiles->sizes[j];
                } else {
                    numbers[n++].integer = tiles->strides[j - tiles->rank];
                }
            }
            break;
        }
        case KGEN_POINTER:
            numbers[n++].pointer = given->is.pointer;
            break;
        case KGEN_REAL:
            numbers[n++].real = (float)given->is.real;
            break;
        default:
            if (wanted->bits == 64) {
                numbers[n].integer = given->is.integer;
            } else if (wanted->bits == 32) {
                numbers[n].narrow = (int32_t)given->is.integer;
            } else if (wanted->bits == 16) {
                numbers[n].half = (int16_t)given->is.integer;
            } else {
                numbers[n].byte = (int8_t)given->is.integer;
            }
            n++;
        }
    }
    for (int i = 0; i < 2; i++, n++) { /* Triton's scratch memory, which these kernels do not use */
        numbers[n].integer = 0;
        parameters[n] = &numbers[n];
    }
    memset(attributes, 0, sizeof attributes);
    memset(&config, 0, sizeof config);
    config.grid[0] = (unsigned int)programs;
    config.grid[1] = config.grid[2] = config.block[1] = config.block[2] = 1;
    config.block[0] = cubin->threads;
    config.shared = cubin->shared;
    config.stream = stream;
    config.attributes = attributes;
    if (cubin->programmatic) {
        attributes[config.count].id = KGEN_PROGRAMMATIC;
        attributes[config.count++].value[0] = 1;
    }
    if (cubin->cooperative) {
        attributes[config.count].id = KGEN_COOPERATIVE;
        attributes[config.count++].value[0] = 1;
    }
    KGEN_CU(cuLaunchKernelEx, &config, function, parameters, NULL);
    return KGEN_OK;
}

#endif
