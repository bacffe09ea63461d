/* Code that examples share: device memory by the driver API, and random numbers, rounding and comparisons.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KGEN_EXAMPLE_H
#define KGEN_EXAMPLE_H

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

#include "kgen.h"

namespace example {

enum Dtype { BF16, FP16, FP32, FP64, FP8, INT32, INT64, UINT8, BOOL };

inline void *symbol(const char *name)
{
    static void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *found = library ? dlsym(library, name) : nullptr;
    if (!found) {
        std::fprintf(stderr, "no CUDA driver: %s was not found\n", library ? name : "libcuda.so.1");
        std::exit(3);
    }
    return found;
}

template <typename... Arguments> void cu(const char *name, Arguments... arguments)
{
    auto function = reinterpret_cast<int (*)(Arguments...)>(symbol(name));
    if (int error = function(arguments...)) {
        std::fprintf(stderr, "%s: error %d\n", name, error);
        std::exit(3);
    }
}

/* Make the primary context of the first device current in this thread. */
inline void begin()
{
    void *context = nullptr;
    int device = 0;
    cu("cuInit", 0u);
    cu("cuDeviceGet", &device, 0);
    cu("cuDevicePrimaryCtxRetain", &context, device);
    cu("cuCtxSetCurrent", context);
}

/* --- numbers ------------------------------------------------------------------------------------------------------ */

inline double random_number()
{
    static uint64_t state = 0x9e3779b97f4a7c15u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return double(state >> 11) / double(uint64_t(1) << 52) - 1.0; /* from -1 to 1 */
}

/* Round small numbers to nearest, ties to even. */
inline uint16_t narrowed(double x, Dtype dtype)
{
    uint32_t bits;
    float single = float(x);
    std::memcpy(&bits, &single, 4);
    if (dtype == BF16) {
        return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    int exponent = std::max(std::ilogb(single == 0.0f ? 1e-8f : std::fabs(single)), -14);
    uint32_t units = uint32_t(std::nearbyint(std::ldexp(std::fabs(double(single)), 10 - exponent)));
    /* Numbers below 2^-14 have no implicit leading one. A carry gives the correct result. */
    return uint16_t(sign | (uint32_t(exponent + 14) * 1024 + units));
}

inline double widened(uint16_t x, Dtype dtype)
{
    if (dtype == BF16) {
        uint32_t bits = uint32_t(x) << 16;
        float single;
        std::memcpy(&single, &bits, 4);
        return single;
    }
    if (dtype == FP8) { /* e4m3: four exponent bits, three mantissa bits */
        int exponent = x >> 3 & 15, units = x & 7;
        double size = exponent ? std::ldexp(8 + units, exponent - 10) : std::ldexp(units, -9);
        return x & 0x80 ? -size : size;
    }
    int exponent = x >> 10 & 31, units = x & 1023;
    double size = exponent ? std::ldexp(1024 + units, exponent - 25) : std::ldexp(units, -24);
    return x & 0x8000 ? -size : size;
}

inline size_t bytes_of(Dtype dtype)
{
    return dtype == INT64 || dtype == FP64                   ? 8
           : dtype == FP32 || dtype == INT32                 ? 4
           : dtype == BOOL || dtype == UINT8 || dtype == FP8 ? 1
                                                             : 2;
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */

/* A contiguous tensor on the device, and its numbers on the host. */
struct Tensor {
    Dtype dtype = FP32;
    std::vector<int64_t> sizes;
    std::vector<double> numbers;
    unsigned long long device = 0;
    std::vector<size_t> *reads = nullptr; /* if not null, reads of elements are appended */

    Tensor(Dtype of, std::initializer_list<int64_t> shape) : dtype(of), sizes(shape)
    {
        size_t count = 1;
        for (int64_t size : sizes) {
            count *= size_t(size);
        }
        numbers.assign(count, 0.0);
        cu("cuMemAlloc_v2", &device, std::max<size_t>(count * bytes_of(dtype), 16));
        to_device();
    }

    Tensor(const Tensor &) = delete;
    Tensor &operator=(const Tensor &) = delete;

    ~Tensor()
    {
        cu("cuMemFree_v2", device);
    }

    bool has(std::initializer_list<int64_t> at) const
    {
        size_t axis = 0;
        for (int64_t index : at) {
            if (index < 0 || index >= sizes[axis++]) {
                return false;
            }
        }
        return true;
    }

    size_t place(std::initializer_list<int64_t> at) const
    {
        size_t found = 0, axis = 0;
        for (int64_t index : at) {
            found = found * size_t(sizes[axis++]) + size_t(index);
        }
        return found;
    }

    /* Return zero for an index out of bounds. */
    double operator()(std::initializer_list<int64_t> at) const
    {
        if (!has(at)) {
            return 0.0;
        }
        if (reads) {
            reads->push_back(place(at));
        }
        return numbers[place(at)];
    }

    /* Ignore elements out of bounds. */
    void add(std::initializer_list<int64_t> at, double x)
    {
        if (has(at)) {
            numbers[place(at)] += x;
        }
    }

    double &element(std::initializer_list<int64_t> at)
    {
        return numbers[place(at)];
    }

    /* Draw numbers, round them to the dtype, and copy them to the device. */
    template <typename Draw> Tensor &draw(Draw drawn)
    {
        for (size_t i = 0; i < numbers.size(); i++) {
            numbers[i] = drawn(int64_t(i));
        }
        to_device();
        return *this;
    }

    Tensor &draw(double most = 1.0)
    {
        return draw([most](int64_t) { return most * random_number(); });
    }

    void to_device()
    {
        std::vector<char> raw(numbers.size() * bytes_of(dtype));
        for (size_t i = 0; i < numbers.size(); i++) {
            char *to = raw.data() + i * bytes_of(dtype);
            if (dtype == BF16 || dtype == FP16) {
                uint16_t narrow = narrowed(numbers[i], dtype);
                std::memcpy(to, &narrow, 2);
                numbers[i] = widened(narrow, dtype);
            } else if (dtype == FP64) {
                std::memcpy(to, &numbers[i], 8);
            } else if (dtype == FP32) {
                float single = float(numbers[i]);
                std::memcpy(to, &single, 4);
                numbers[i] = single;
            } else {
                int64_t whole = int64_t(numbers[i]);
                std::memcpy(to, &whole, bytes_of(dtype));
            }
        }
        if (!raw.empty()) {
            cu("cuMemcpyHtoD_v2", device, static_cast<const void *>(raw.data()), raw.size());
        }
    }

    void from_device()
    {
        std::vector<char> raw(numbers.size() * bytes_of(dtype));
        cu("cuMemcpyDtoH_v2", static_cast<void *>(raw.data()), device, raw.size());
        for (size_t i = 0; i < numbers.size(); i++) {
            const char *from = raw.data() + i * bytes_of(dtype);
            uint16_t narrow = 0;
            float single = 0.0f;
            std::memcpy(&narrow, from, std::min<size_t>(bytes_of(dtype), 2));
            if (dtype == FP32) {
                std::memcpy(&single, from, 4);
            }
            if (dtype == FP64) {
                std::memcpy(&numbers[i], from, 8);
            } else {
                numbers[i] = dtype == FP32 ? double(single) : widened(narrow, dtype);
            }
        }
    }

    kgen_tensor given() const
    {
        kgen_tensor found = {};
        found.data = reinterpret_cast<void *>(uintptr_t(device));
        int64_t step = 1;
        for (size_t i = sizes.size(); i-- > 0;) {
            found.sizes[i] = sizes[i];
            found.strides[i] = step;
            step *= sizes[i];
        }
        return found;
    }
};

/* Device memory for the workspace of a call. */
struct Workspace {
    unsigned long long device = 0;
    size_t bytes;

    explicit Workspace(size_t wanted) : bytes(wanted)
    {
        cu("cuMemAlloc_v2", &device, std::max<size_t>(bytes, 16));
    }

    Workspace(const Workspace &) = delete;
    Workspace &operator=(const Workspace &) = delete;

    ~Workspace()
    {
        cu("cuMemFree_v2", device);
    }

    void *data() const
    {
        return reinterpret_cast<void *>(uintptr_t(device));
    }
};

inline void check(int status, const char *words)
{
    if (status != KGEN_OK) {
        std::fprintf(stderr, "error %d: %s\n", status, words);
        std::exit(1);
    }
}

inline void finish()
{
    cu("cuCtxSynchronize");
}

/* Return true if a result is `wanted`, up to `allowed` times the largest number. */
inline bool right(const char *name, Tensor &got, const std::vector<double> &wanted, double allowed)
{
    double error = 0.0, most = 0.0;
    got.from_device();
    for (size_t i = 0; i < wanted.size(); i++) {
        double off = std::fabs(got.numbers[i] - wanted[i]);
        if (std::isinf(wanted[i]) && got.numbers[i] == wanted[i]) {
            continue;
        }
        error = off <= error ? error : off; /* also if it is NaN */
        most = std::max(most, std::fabs(wanted[i]));
    }
    bool fine = error <= allowed * std::max(most, 1e-6);
    std::printf("%-8s max error %.3e of numbers up to %.3e: %s\n", name, error, most, fine ? "right" : "WRONG");
    return fine;
}

/* The derivative of a function of several numbers by one of them. */
template <typename Values> double slope(double (*function)(const Values &), Values at, double Values::*of)
{
    const double value = at.*of, step = 1e-5 * std::max(1.0, std::fabs(value));
    at.*of = value + step;
    const double above = function(at);
    at.*of = value - step;
    return (above - function(at)) / (2.0 * step);
}

/* --- functions of expressions ------------------------------------------------------------------------------------- */

inline int64_t f_floordiv(int64_t a, int64_t b)
{
    int64_t quotient = a / b;
    return quotient - (a % b != 0 && (a < 0) != (b < 0));
}

inline int64_t f_mod(int64_t a, int64_t b)
{
    return a - f_floordiv(a, b) * b;
}

inline double f_sigmoid(double x)
{
    return 0.5 * (1.0 + std::tanh(0.5 * x));
}

inline double f_sign(double x)
{
    return double(x > 0.0) - double(x < 0.0);
}

} // namespace example

#endif
