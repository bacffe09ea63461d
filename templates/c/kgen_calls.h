/* Code that the calls of a package share: checks of tensors, workspace layout, and descriptions of tensors for TMA.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KGEN_CALLS_H
#define KGEN_CALLS_H

#include "kgen_runtime.h"

/* --- checks ------------------------------------------------------------------------------------------------------- */

/* A size that is not checked. */
enum { KGEN_ANY = -1 };

/* The most elements of a tensor, counting sizes of 0 as 1: addresses have 48 bits. */
#define KGEN_MOST ((int64_t)1 << 48)

static inline int kgen_numel_is_zero(const int64_t *sizes, int rank)
{
    for (int i = 0; i < rank; i++) {
        if (sizes[i] == 0) {
            return 1;
        }
    }
    return 0;
}

/* Format sizes: of a tensor, or with `any` the expected ones. */
static inline const char *kgen_shape(char *text, size_t room, const int64_t *sizes, int rank, int any)
{
    size_t used = 0;
    for (int i = 0; i < rank && used < room; i++) {
        used += (size_t)snprintf(text + used, room - used, any && sizes[i] == KGEN_ANY ? "%s*" : "%s%lld",
                                 i ? ", " : "", (long long)sizes[i]);
    }
    return text;
}

/* Check that a tensor has these sizes. Elements of a row are at most `widest` apart, and a row spans less than 2^31. */
static inline int kgen_check(const char *function, const char *label, const kgen_tensor *x, const int64_t *sizes,
                             int rank, int bytes, int64_t widest)
{
    char wanted[128], got[128];
    double most = 1;
    int fits = 1;
    for (int i = 0; i < rank; i++) {
        fits = fits && x->sizes[i] >= 0 && (sizes[i] == KGEN_ANY || sizes[i] == x->sizes[i]);
    }
    if (!fits) {
        return kgen_fail(KGEN_INVALID, "%s: %s must be [%s], got [%s]", function, label,
                         kgen_shape(wanted, sizeof wanted, sizes, rank, 1),
                         kgen_shape(got, sizeof got, x->sizes, rank, 0));
    }
    for (int i = 0; i < rank; i++) {
        most *= x->sizes[i] > 1 ? (double)x->sizes[i] : 1;
    }
    if (most > (double)KGEN_MOST) {
        return kgen_fail(KGEN_INVALID, "%s: %s [%s] has more than 2**48 elements", function, label,
                         kgen_shape(got, sizeof got, x->sizes, rank, 0));
    }
    if (kgen_numel_is_zero(x->sizes, rank)) {
        return KGEN_OK;
    }
    if (!x->data) {
        return kgen_fail(KGEN_INVALID, "%s: %s is NULL", function, label);
    }
    if ((uintptr_t)x->data % (uintptr_t)bytes) {
        return kgen_fail(KGEN_INVALID, "%s: %s must be aligned to %d bytes", function, label, bytes);
    }
    for (int i = 0; i < rank; i++) {
        if (x->strides[i] < 0) {
            return kgen_fail(KGEN_INVALID, "%s: strides of %s may not be negative, got %lld", function, label,
                             (long long)x->strides[i]);
        }
    }
    if (x->strides[rank - 1] > widest || (x->sizes[rank - 1] - 1) * x->strides[rank - 1] > INT32_MAX) {
        return kgen_fail(KGEN_INVALID, "%s: the last stride of %s is too large, got %lld: make the tensor contiguous",
                         function, label, (long long)x->strides[rank - 1]);
    }
    return KGEN_OK;
}

/* Check that a tensor has these sizes and is contiguous. */
static inline int kgen_check_contiguous(const char *function, const char *label, const kgen_tensor *x,
                                        const int64_t *sizes, int rank, int bytes)
{
    int64_t step = 1;
    KGEN_TRY(kgen_check(function, label, x, sizes, rank, bytes, INT32_MAX));
    for (int i = rank - 1; i >= 0 && !kgen_numel_is_zero(x->sizes, rank); i--) {
        if (x->sizes[i] != 1 && x->strides[i] != step) {
            return kgen_fail(KGEN_INVALID, "%s: %s must be contiguous", function, label);
        }
        step *= x->sizes[i];
    }
    return KGEN_OK;
}

/* Check that float32 represents a number: finite, and not rounded to zero. */
static inline int kgen_check_real(const char *function, const char *label, double x)
{
    double size = x < 0 ? -x : x;
    if (x != 0 && !(size >= 1.1754943508222875e-38 && size <= 3.4028234663852886e38)) {
        return kgen_fail(KGEN_INVALID, "%s: %s must be finite and must not underflow in float32, got %g", function,
                         label, x);
    }
    return KGEN_OK;
}

/* Set the strides of a contiguous tensor, also for dimensions of size 0 or 1. */
static inline void kgen_dense_strides(kgen_value *values, const kgen_tensor *x, int rank)
{
    int64_t step = 1;
    for (int i = rank - 1; i >= 0; i--) {
        values[i] = kgen_integer(step);
        step *= x->sizes[i] > 1 ? x->sizes[i] : 1;
    }
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* Append `bytes` to a workspace of `total` bytes and return their offset, a multiple of 256. */
static inline size_t kgen_room(size_t *total, int64_t bytes)
{
    size_t at = (*total + 255) / 256 * 256;
    *total = at + (size_t)bytes;
    return at;
}

static inline int kgen_check_workspace(const char *function, const void *workspace, size_t bytes, size_t needed)
{
    if (bytes < needed || (needed && !workspace)) {
        return kgen_fail(KGEN_WORKSPACE, "%s: the workspace must have %zu bytes, got %zu", function, needed,
                         workspace ? bytes : 0);
    }
    if ((uintptr_t)workspace % 16) {
        return kgen_fail(KGEN_WORKSPACE, "%s: the workspace must be aligned to 16 bytes", function);
    }
    return KGEN_OK;
}

/* Fill elements of 2 or more bytes with zeros. The driver's words of 4 bytes must be aligned. */
static inline int kgen_zeros(void *memory, int64_t bytes, CUstream stream)
{
    const unsigned long long address = (unsigned long long)(uintptr_t)memory;
    if (!bytes) {
        return KGEN_OK;
    }
    if (address % 4 || bytes % 4) {
        KGEN_CU(cuMemsetD16Async, address, 0, (size_t)bytes / 2, stream);
    } else {
        KGEN_CU(cuMemsetD32Async, address, 0, (size_t)bytes / 4, stream);
    }
    return KGEN_OK;
}

/* Copy contiguous rows of `bytes` to rows that begin `pitch` bytes apart. */
static inline int kgen_copy_rows(void *to, int64_t pitch, const void *from, int64_t bytes, int64_t rows,
                                 CUstream stream)
{
    kgen_copy copy;
    memset(&copy, 0, sizeof copy);
    copy.from_type = copy.to_type = KGEN_ON_DEVICE;
    copy.from_device = (unsigned long long)(uintptr_t)from;
    copy.to_device = (unsigned long long)(uintptr_t)to;
    copy.from_pitch = (size_t)bytes;
    copy.to_pitch = (size_t)pitch;
    copy.width = (size_t)bytes;
    copy.height = (size_t)rows;
    KGEN_CU(cuMemcpy2DAsync, &copy, stream);
    return KGEN_OK;
}

/* --- numbers ------------------------------------------------------------------------------------------------------ */

static inline int64_t kgen_cdiv(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static inline int64_t kgen_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t kgen_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline int64_t kgen_next_power_of_2(int64_t n)
{
    int64_t power = 1;
    while (power < n) {
        power *= 2;
    }
    return power;
}

/* --- TMA ---------------------------------------------------------------------------------------------------------- */

/* True if TMA can load tiles of x: elements of a row are contiguous, and rows begin at multiples of 16 bytes. */
static inline int kgen_by_tma(const kgen_tensor *x, int rank, int bytes)
{
    for (int i = 0; i + 1 < rank; i++) {
        if (x->strides[i] <= 0 || x->strides[i] * bytes % 16) {
            return 0;
        }
    }
    return x->strides[rank - 1] == 1 && (uintptr_t)x->data % 16 == 0 && !kgen_numel_is_zero(x->sizes, rank);
}

/* Describe tiles [rows, columns] of x [.., S, D]. */
static inline kgen_value kgen_tiled(kgen_tiles *tiles, const kgen_tensor *x, int dtype, int rank, int64_t rows,
                                    int64_t columns)
{
    memset(tiles, 0, sizeof *tiles);
    tiles->data = x->data;
    tiles->dtype = dtype;
    tiles->rank = rank;
    for (int i = 0; i < rank; i++) {
        tiles->sizes[i] = x->sizes[i];
        tiles->strides[i] = x->strides[i];
        tiles->tile[i] = 1;
    }
    tiles->tile[rank - 2] = (int32_t)rows;
    tiles->tile[rank - 1] = (int32_t)columns;
    return kgen_described(tiles);
}

/* Describe tiles of packed x [T, H, D]. Row r of a sequence that ends before token `end` is at
 * [FAR, end, h, FAR - length + r]. By the strides, modulo 2**64, that is token end - length + r. Rows past the sequence
 * are out of bounds: TMA reads zeros and writes nothing. */
static inline kgen_value kgen_tiled_by_ends(kgen_tiles *tiles, const kgen_tensor *x, int dtype, int64_t rows,
                                            int64_t columns)
{
    const int64_t far = (int64_t)1 << 30, t = x->strides[0], h = x->strides[1];
    const int64_t sizes[] = {far + 1, x->sizes[0] + 1, x->sizes[1], far, x->sizes[2]};
    const int64_t strides[] = {((int64_t)1 << 34) - t, t, h, t, 1};
    memset(tiles, 0, sizeof *tiles);
    tiles->data = x->data;
    tiles->dtype = dtype;
    tiles->rank = KGEN_MAP_DIMS;
    for (int i = 0; i < KGEN_MAP_DIMS; i++) {
        tiles->sizes[i] = sizes[i];
        tiles->strides[i] = strides[i];
        tiles->tile[i] = 1;
    }
    tiles->tile[3] = (int32_t)rows;
    tiles->tile[4] = (int32_t)columns;
    return kgen_described(tiles);
}

/* Describe tiles of n numbers of a row of [rows, length] float32, whose rows begin `pitch` numbers apart. */
static inline kgen_value kgen_tiled_rows(kgen_tiles *tiles, const void *data, int64_t rows, int64_t length,
                                         int64_t pitch, int64_t n)
{
    kgen_tensor x;
    memset(&x, 0, sizeof x);
    x.data = (void *)(uintptr_t)data;
    x.sizes[0] = rows;
    x.sizes[1] = length;
    x.strides[0] = pitch;
    x.strides[1] = 1;
    return kgen_tiled(tiles, &x, KGEN_FP32, 2, 1, n);
}

/* Return a view of the columns of x from `first`. */
static inline kgen_tensor kgen_columns_from(const kgen_tensor *x, int rank, int64_t first, int bytes)
{
    kgen_tensor rest = *x;
    rest.data = (char *)x->data + first * bytes;
    rest.sizes[rank - 1] -= first;
    return rest;
}

/* Return a view of x with dimensions i and j swapped. */
static inline kgen_tensor kgen_swapped(const kgen_tensor *x, int i, int j)
{
    kgen_tensor other = *x;
    other.sizes[i] = x->sizes[j];
    other.sizes[j] = x->sizes[i];
    other.strides[i] = x->strides[j];
    other.strides[j] = x->strides[i];
    return other;
}

/* Return a view of x with four dimensions: prepend dimensions of size 1. */
static inline kgen_tensor kgen_in_four(const kgen_tensor *x, int rank)
{
    kgen_tensor wide = *x;
    for (int i = 0; i < 4; i++) {
        int from = i - (4 - rank);
        wide.sizes[i] = from < 0 ? 1 : x->sizes[from];
        wide.strides[i] = from < 0 ? x->sizes[0] * x->strides[0] : x->strides[from];
    }
    return wide;
}

#endif
