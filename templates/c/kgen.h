/* Types of the arguments of kernels made by kgen. All packages share this file, and one program may use several.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KGEN_H
#define KGEN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The type of cuda.h, which is not needed here but may also be included. NULL is the default stream. */
typedef struct CUstream_st *CUstream;

enum { KGEN_DIMS = 5 };

/* A tensor on the device. Sizes and strides are in elements. Entries past the last dimension are not read. `data` is
 * NULL if there is no tensor. */
typedef struct kgen_tensor {
    void *data;
    int64_t sizes[KGEN_DIMS];
    int64_t strides[KGEN_DIMS];
} kgen_tensor;

/* Return codes. NAME_error() of the library returns the message. */
enum {
    KGEN_OK = 0,
    KGEN_INVALID = 1,   /* an invalid argument */
    KGEN_WORKSPACE = 2, /* a workspace that is too small, or not aligned to 16 bytes */
    KGEN_NO_KERNEL = 3, /* no machine code for the device, or for these arguments */
    KGEN_DRIVER = 4     /* there is no CUDA driver, or a call of it failed */
};

/* The result of a workspace query that fails. */
#define KGEN_NO_SIZE ((size_t)-1)

#ifdef __cplusplus
}
#endif

#endif
