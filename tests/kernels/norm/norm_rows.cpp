// Rows that are not multiples of 16 bytes, against double precision: forward, backward and 8-bit outputs.
// Tensors begin anywhere in memory of exactly their size, with any stride and NaN between rows. Other memory of the
// outputs must not change.
#include "fibers.h"

#include "rms_norm.h"
#include "rms_norm_fp8.h"

#include <memory>
#include <random>

namespace rms = rms_norm_kernels;
namespace fp8 = rms_norm_fp8_kernels;

static std::mt19937 generator(1);
static long wrong;

// Memory that begins and ends at multiples of 256 bytes.
static void* aligned(long bytes) {
    void* memory;
    if (posix_memalign(&memory, 256, bytes)) stop("no memory");
    return memory;
}

struct Tensor {
    long rows, width, stride, lead;
    unsigned short *memory, *p;
    Tensor(long rows, long width, long stride, long lead, bool filled) : rows(rows), width(width), stride(stride), lead(lead) {
        const long n = lead + (rows - 1) * stride + width;
        memory = (unsigned short*)aligned(n * 2);
        p = memory + lead;
        for (long i = 0; i < n; ++i) memory[i] = 0x7fff;
        std::normal_distribution<float> normal(1, 3);
        for (long r = 0; filled && r < rows; ++r)
            for (long c = 0; c < width; ++c) p[r * stride + c] = to_bf16(normal(generator));
    }
    ~Tensor() {
        for (long i = 0; i < lead; ++i) wrong += memory[i] != 0x7fff;
        free(memory);
    }
    double at(long r, long c) const { return __uint_as_float((unsigned int)p[r * stride + c] << 16); }
};

static void compare(const char* what, double got, double want, long r, long c) {
    if (!(fabs(got - want) <= 0.01 * fabs(want) + 0.01) && wrong++ < 5) printf("%s at %ld, %ld: %g, not %g\n", what, r, c, got, want);
}
static std::vector<double> norms(const Tensor& x) {
    std::vector<double> rstd(x.rows);
    for (long r = 0; r < x.rows; ++r) {
        double squares = 0;
        for (long c = 0; c < x.width; ++c) squares += x.at(r, c) * x.at(r, c);
        rstd[r] = 1 / sqrt(squares / x.width + 1e-5);
    }
    return rstd;
}
template <int THREADS, int ROWS, int ELEMENTS, int STAGES>
size_t shared(int loaded, int stored) {
    return STAGES > 0 ? ROWS * (THREADS * ELEMENTS + 16) * (STAGES * loaded + stored) : 0;
}

struct Case {
    long rows, width, x_stride, g_stride, x_lead, out_lead;
};

template <int THREADS, int ROWS, int ELEMENTS, int STAGES>
void forward(Case k) {
    Tensor x(k.rows, k.width, k.x_stride, k.x_lead, true), w(1, k.width, k.width, 0, true), y(k.rows, k.width, k.width, k.out_lead, false);
    std::vector<float> rstd(k.rows), scale(k.rows);
    const std::vector<double> norm = norms(x);
    const int grid = STAGES > 1 ? 2 : (k.rows + ROWS - 1) / ROWS;  // blocks with one row at a time end with it
    launch(grid, THREADS * ROWS, shared<THREADS, ROWS, ELEMENTS, STAGES>(2, 2), [&] {
        rms::forward_kernel<THREADS, ROWS, ELEMENTS, 1, 1, STAGES, 1>((rms::bf16*)x.p, k.x_stride, (rms::bf16*)w.p, (rms::bf16*)y.p, rstd.data(), k.rows, k.width, 1e-5f);
    });
    std::unique_ptr<unsigned char, decltype(&free)> memory((unsigned char*)aligned(k.out_lead + k.rows * k.width), free);
    unsigned char* bits = memory.get() + k.out_lead;
    std::fill(memory.get(), bits, 77);
    launch(grid, THREADS * ROWS, shared<THREADS, ROWS, ELEMENTS, STAGES>(2, 1), [&] {
        fp8::forward_kernel<THREADS, ROWS, ELEMENTS, 1, 1, STAGES, 1>((fp8::bf16*)x.p, k.x_stride, (fp8::bf16*)w.p, (fp8::fp8_e4m3*)bits, scale.data(), k.rows, k.width, 1e-5f);
    });
    wrong += std::count(memory.get(), bits, 77) != k.out_lead;
    for (long r = 0; r < k.rows; ++r) {
        double largest = 0;
        for (long c = 0; c < k.width; ++c) largest = std::max(largest, fabs(x.at(r, c) * norm[r] * w.at(0, c)));
        for (long c = 0; c < k.width; ++c) {
            const double want = x.at(r, c) * norm[r] * w.at(0, c);
            compare("out", y.at(r, c), want, r, c);
            const int eight = lrint(want / largest * 112) + 120;
            if (abs(bits[r * k.width + c] - eight) > 1 && wrong++ < 5) printf("eight bits at %ld, %ld: %d, not %d\n", r, c, bits[r * k.width + c], eight);
        }
    }
}

template <int THREADS, int ROWS, int ELEMENTS, int STAGES>
void backward(Case k) {
    Tensor x(k.rows, k.width, k.x_stride, k.x_lead, true), g(k.rows, k.width, k.g_stride, k.x_lead, true), w(1, k.width, k.width, 0, true);
    Tensor dx(k.rows, k.width, k.width, k.out_lead, false);
    const std::vector<double> norm = norms(x);
    const std::vector<float> rstd(norm.begin(), norm.end());
    std::vector<float> parts(2 * k.width, NAN);
    launch(2, THREADS * ROWS, shared<THREADS, ROWS, ELEMENTS, STAGES>(4, 2), [&] {
        rms::backward_kernel<THREADS, ROWS, ELEMENTS, 1, 1, STAGES, 1>((rms::bf16*)g.p, k.g_stride, (rms::bf16*)x.p, k.x_stride, (rms::bf16*)w.p, rstd.data(), (rms::bf16*)dx.p, parts.data(), k.rows, k.width);
    });
    std::vector<double> dw(k.width);
    for (long r = 0; r < k.rows; ++r) {
        double c1 = 0;
        for (long c = 0; c < k.width; ++c) {
            c1 += g.at(r, c) * w.at(0, c) * x.at(r, c) * norm[r] / k.width;
            dw[c] += g.at(r, c) * x.at(r, c) * norm[r];
        }
        for (long c = 0; c < k.width; ++c) compare("dx", dx.at(r, c), (g.at(r, c) * w.at(0, c) - x.at(r, c) * norm[r] * c1) * norm[r], r, c);
    }
    for (long c = 0; ELEMENTS > 0 && c < k.width; ++c) compare("dweight", parts[c] + parts[k.width + c], dw[c], 0, c);
}

template <typename Body>
void cases(long rows, std::initializer_list<long> widths, Body body) {
    for (long width : widths)
        for (long lead : {0, 1, 5})
            for (long stride : {width, width + 1, width + 8, width + 13, 0L}) body(Case{rows, width, stride, width + (stride + lead) % 9, lead, 3 * (lead == 5)});
}

int main() {
    cases(37, {1, 2, 7, 8, 63, 64}, [](Case k) { forward<8, 16, 8, 2>(k), backward<8, 16, 8, 2>(k); });
    cases(41, {129, 257, 264, 272}, [](Case k) { forward<16, 8, 17, 2>(k), backward<16, 8, 17, 3>(k); });
    cases(5, {1, 129, 1001}, [](Case k) { forward<128, 1, 0, 0>(k), backward<128, 1, 0, 0>(k); });  // of any width
    cases(5, {1001, 1024}, [](Case k) { forward<64, 2, 16, 2>(k), backward<128, 1, 8, 2>(k); });
    if (wrong) stop("wrong");
    printf("right\n");
}
