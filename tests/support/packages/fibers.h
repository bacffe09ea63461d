// CUDA on a CPU. The threads of a block are fibers that switch at barriers and shuffles. An asynchronous copy happens
// at its wait, as late as possible. Blocks run one after the other.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __restrict__
using std::max;
using std::min;

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct Index {
    unsigned int x = 0, y = 0, z = 0;
};
static Index threadIdx, blockIdx, gridDim;
static char* dynamic_shared;

static float __uint_as_float(unsigned int bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static unsigned short to_bf16(float x) {
    unsigned int bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// A substitute for e4m3 with distinct values: eight bits in steps of 4.
static unsigned short to_eight_bits(float x) { return (unsigned char)(lrintf(fmaxf(-448, fminf(448, x)) / 4) + 120); }

struct Copy {
    void* to;
    const void* from;
    int bytes, live;
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 17);
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
    bool done;
};
struct Barrier {
    int arrived = 0;
    unsigned int turn = 0;
};
static std::vector<Fiber> fibers(1024);
static ucontext_t scheduler;
static Barrier of_block, of_warp[32];
static float shuffled[1024];
static int block;
static std::function<void()> kernel;

static void stop(const char* why) {
    printf("%s\n", why);
    exit(1);
}
static void arrive(Barrier& barrier, int threads) {
    const unsigned int turn = barrier.turn, me = threadIdx.x;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.turn;
    }
    while (barrier.turn == turn) swapcontext(&fibers[me].context, &scheduler);
}
static void __syncthreads() { arrive(of_block, block); }
static void __syncwarp() { arrive(of_warp[threadIdx.x / 32], std::min(32, block - (int)threadIdx.x / 32 * 32)); }
static float __shfl_xor_sync(unsigned int, float x, int lanes) {
    const int t = threadIdx.x;
    shuffled[t] = x;
    __syncwarp();
    const float y = shuffled[t ^ lanes];
    __syncwarp();
    return y;
}
static void copy_later(void* to, const void* from, int bytes, int live) {
    if ((uintptr_t)from % bytes || (uintptr_t)to % bytes || live < 0 || live > bytes) stop("a copy that cp.async does not take");
    fibers[threadIdx.x].open.push_back({to, from, bytes, live});
}
static void commit_copies() {
    Fiber& fiber = fibers[threadIdx.x];
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
}
static void wait_for_copies(int pending) {
    auto& groups = fibers[threadIdx.x].groups;
    for (; (int)groups.size() > pending; groups.erase(groups.begin()))
        for (const Copy& c : groups[0]) {
            memcpy(c.to, c.from, c.live);
            memset((char*)c.to + c.live, 0, c.bytes - c.live);
        }
}
static void run_fiber() {
    kernel();
    fibers[threadIdx.x].done = true;
    swapcontext(&fibers[threadIdx.x].context, &scheduler);
}

// Run `body` as a kernel of `grid` blocks of `threads`. Its `shared` bytes of dynamic shared memory begin as NaN.
static void launch(int grid, int threads, size_t shared, std::function<void()> body) {
    kernel = body;
    block = threads;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < (unsigned int)grid; ++blockIdx.x) {
        dynamic_shared = (char*)aligned_alloc(16, shared);
        memset(dynamic_shared, 0xff, shared);
        of_block = Barrier();
        for (Barrier& barrier : of_warp) barrier = Barrier();
        for (int t = 0; t < threads; ++t) {
            Fiber& fiber = fibers[t];
            fiber.done = false;
            fiber.groups.clear();
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            makecontext(&fiber.context, run_fiber, 0);
        }
        // Alternate between both orders, because no result may depend on the order.
        bool live = true;
        for (long round = 0; live; ++round) {
            if (round > 1000000) stop("a barrier that not all reach");
            live = false;
            for (int k = 0; k < threads; ++k) {
                const int t = round % 2 ? threads - 1 - k : k;
                if (fibers[t].done) continue;
                live = true;
                threadIdx.x = t;
                swapcontext(&scheduler, &fibers[t].context);
            }
        }
        free(dynamic_shared);
    }
}
