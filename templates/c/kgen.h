/* What kernels made by kgen are called with. The same for all of them: any number of packages may be in one program.
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

/* As cuda.h has it, which is not needed here and may be included as well. NULL is the default stream. */
typedef struct CUstream_st *CUstream;

enum { KGEN_DIMS = 5 };

/* A tensor on the device. Sizes and strides are in elements; those past its last dimension are not read. Where `data` is
 * NULL there is no tensor. */
typedef struct kgen_tensor {
    void *data;
    int64_t sizes[KGEN_DIMS];
    int64_t strides[KGEN_DIMS];
} kgen_tensor;

/* What a function returns; its library's NAME_error() has the words. */
enum {
    KGEN_OK = 0,
    KGEN_INVALID = 1,   /* an argument that does not fit */
    KGEN_WORKSPACE = 2, /* a workspace that is too small, or not aligned to 16 bytes */
    KGEN_NO_KERNEL = 3, /* no machine code for the device, or for these arguments */
    KGEN_DRIVER = 4     /* the CUDA driver is not there, or said no */
};

/* What a workspace query returns where it fails. */
#define KGEN_NO_SIZE ((size_t)-1)

#ifdef __cplusplus
}
#endif

#endif
