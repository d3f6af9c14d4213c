// A GPU's instructions for a CPU, in the place of models/kernels/cuda/instructions.h: the .cu file beside a copy of
// this one is compiled as C++.
//
// The threads of a block are fibers of one thread of the CPU. A fiber goes on until it waits for others: at a barrier
// of the block, or where the 32 lanes of a warp do something together. What GPUs leave undefined is made visible:
// shared memory begins as NaN, asynchronous copies arrive as late as they may, and threads and blocks run in either
// order.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#define DEVICE inline
#define __global__
#define __launch_bounds__(...)

using std::max;
using std::min;

struct uint4 {
    unsigned values[4];
};
struct alignas(8) float2 {
    float x;
    float y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

struct Index {
    int x;
};
static Index threadIdx;
static Index blockIdx;

// ---- Threads.

constexpr int LANES = 32;
constexpr size_t STACK_BYTES = 1 << 18;
constexpr int GUARD_BYTES = 4096;  // behind shared memory

struct Copy {
    void* to;
    const void* from;
    bool wanted;
};

struct Thread {
    ucontext_t start;
    jmp_buf place;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    bool begun;
    bool ended;
    bool waits;
    std::deque<std::vector<Copy>> copies;  // groups; the last is not ended
};

// What the lanes of a warp do together: each gives its operands, and the last one does it.
struct Warp {
    const void* operands[LANES];
    const void* what;
    int arrived;
};

struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<char> shared;
    void (*body)(const void*);
    const void* arguments;
    jmp_buf scheduler;
    int running;  // number of the running thread
    int arrived;  // threads at the barrier
    bool wrong;   // lanes of a warp did different things together
    int64_t conflicts;
};
static Block block;

inline void pause() {
    if (!_setjmp(block.threads[block.running].place)) _longjmp(block.scheduler, 1);
}

inline void begin() {
    block.body(block.arguments);
    block.threads[block.running].ended = true;
    _longjmp(block.scheduler, 1);
}

inline void go_on(int number) {
    Thread& thread = block.threads[number];
    block.running = number;
    threadIdx.x = number;
    if (_setjmp(block.scheduler)) return;
    if (thread.begun) _longjmp(thread.place, 1);
    thread.begun = true;
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack.data();
    thread.start.uc_stack.ss_size = thread.stack.size();
    makecontext(&thread.start, begin, 0);
    setcontext(&thread.start);
}

// Runs a block. Returns whether all threads ended, and wrote no memory behind that of the block.
inline bool run_block(int threads, int shared_bytes, bool descending) {
    block.threads.resize(threads);
    block.warps.assign((threads + LANES - 1) / LANES, Warp());
    block.shared.assign(shared_bytes + GUARD_BYTES, char(0xff));
    block.arrived = 0;
    block.wrong = false;
    for (Thread& thread : block.threads) {
        thread.begun = thread.ended = thread.waits = false;
        thread.copies.assign(1, {});
    }
    for (bool progress = true; progress && !block.wrong;) {
        progress = false;
        for (int place = 0; place < threads; place++) {
            const int number = descending ? threads - 1 - place : place;
            const Thread& thread = block.threads[number];
            if (thread.ended || thread.waits) continue;
            go_on(number);
            progress = true;
        }
    }
    for (const Thread& thread : block.threads)
        if (!thread.ended) return false;
    for (int byte = 0; byte < GUARD_BYTES; byte++)
        if (block.shared[shared_bytes + byte] != char(0xff)) return false;
    return !block.wrong;
}

inline void __syncthreads() {
    if (++block.arrived == int(block.threads.size())) {
        block.arrived = 0;
        for (Thread& thread : block.threads) thread.waits = false;
        return;
    }
    block.threads[block.running].waits = true;
    pause();
}

// act(operands of all lanes), once for a warp. what: the same for the same kind of action.
template <class Operands, class Act>
void together(const void* what, const Operands& operands, Act act) {
    const int first = block.running / LANES * LANES;
    Warp& warp = block.warps[block.running / LANES];
    if (warp.arrived && warp.what != what) block.wrong = true;
    warp.what = what;
    warp.operands[block.running - first] = &operands;
    if (++warp.arrived < LANES) {
        block.threads[block.running].waits = true;
        pause();
        return;
    }
    const Operands* all[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        all[lane] = static_cast<const Operands*>(warp.operands[lane]);
        block.threads[first + lane].waits = false;
    }
    act(all);
    warp.arrived = 0;
}

// ---- Memory.

inline char* shared_memory() {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(block.shared.data()) + 15) / 16 * 16);
}

inline void copy_async(void* to_shared, const void* from, bool wanted) {
    block.threads[block.running].copies.back().push_back({to_shared, from, wanted});
}

inline void end_copies() { block.threads[block.running].copies.push_back({}); }

template <int PENDING>
void wait_for_copies() {
    auto& groups = block.threads[block.running].copies;
    for (; groups.size() > PENDING + 1; groups.pop_front())
        for (const Copy& copy : groups.front()) {
            if (copy.wanted)
                std::memcpy(copy.to, copy.from, 16);
            else
                std::memset(copy.to, 0, 16);
        }
}

// ---- Matrices.

using Bits = unsigned short;

inline unsigned pair_of(Bits low, Bits high) { return unsigned(high) << 16 | low; }

struct Loading {
    unsigned* matrices;
    const void* row;
};

// Rows of 16 bytes that lie in the same banks are read one after the other.
inline int conflicts_of(const Loading* const* rows) {
    int most = 0;
    for (int one = 0; one < 8; one++) {
        std::vector<uintptr_t> same;
        for (int other = 0; other < 8; other++) {
            const uintptr_t address = reinterpret_cast<uintptr_t>(rows[other]->row);
            const bool meets = address / 16 % 8 == reinterpret_cast<uintptr_t>(rows[one]->row) / 16 % 8;
            if (meets && std::find(same.begin(), same.end(), address) == same.end()) same.push_back(address);
        }
        most = std::max(most, int(same.size()) - 1);
    }
    return most;
}

// COUNT matrices of 8 rows; row r of matrix m is at the address of lane 8 m + r.
template <int COUNT, bool TRANSPOSED>
void load(unsigned* matrices, const void* row) {
    static const char what = 0;
    together(&what, Loading{matrices, row}, [](const Loading* const* lanes) {
        for (int matrix = 0; matrix < COUNT; matrix++) {
            const Loading* const* rows = lanes + 8 * matrix;
            block.conflicts += conflicts_of(rows);
            const auto element = [&](int row, int column) {
                return static_cast<const Bits*>(rows[row]->row)[column];
            };
            for (int lane = 0; lane < LANES; lane++) {
                const int line = lane / 4;
                const int pair = lane % 4 * 2;
                lanes[lane]->matrices[matrix] = TRANSPOSED ? pair_of(element(pair, line), element(pair + 1, line))
                                                           : pair_of(element(line, pair), element(line, pair + 1));
            }
        }
    });
}

inline void load_matrices(unsigned (&matrices)[4], const void* row) { load<4, false>(matrices, row); }
inline void load_transposed(unsigned (&matrices)[4], const void* row) { load<4, true>(matrices, row); }
inline void load_transposed(unsigned (&matrices)[2], const void* row) { load<2, true>(matrices, row); }

inline float float_of(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned bits_of(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float widened(Bits bits) {
#if BFLOAT16
    return float_of(unsigned(bits) << 16);
#else
    _Float16 value;
    std::memcpy(&value, &bits, sizeof value);
    return float(value);
#endif
}

inline Bits narrowed(float value) {
#if BFLOAT16
    const unsigned bits = bits_of(value);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
#else
    const _Float16 half = _Float16(value);
    Bits bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
#endif
}

inline unsigned rounded(float low, float high) { return pair_of(narrowed(low), narrowed(high)); }

struct Product {
    float* sums;
    const unsigned* a;
    const unsigned* b;
};

// mma.sync.m16n8k16: which lane has which element is as in the PTX ISA's figures of this shape. Sums are exact, but for
// one rounding.
inline void multiply_add(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    static const char what = 0;
    together(&what, Product{sums, a, b}, [](const Product* const* lanes) {
        static double left[16][16];
        static double right[16][8];
        const auto half = [](unsigned pair, int i) { return double(widened(Bits(pair >> 16 * i))); };
        for (int lane = 0; lane < LANES; lane++) {
            const int group = lane / 4;
            const int in_group = lane % 4;
            for (int i = 0; i < 8; i++) {
                const int row = i % 4 < 2 ? group : group + 8;
                const int column = in_group * 2 + i % 2 + (i < 4 ? 0 : 8);
                left[row][column] = half(lanes[lane]->a[i / 2], i % 2);
            }
            for (int i = 0; i < 4; i++)
                right[in_group * 2 + i % 2 + (i < 2 ? 0 : 8)][group] = half(lanes[lane]->b[i / 2], i % 2);
        }
        for (int lane = 0; lane < LANES; lane++)
            for (int i = 0; i < 4; i++) {
                const int row = i < 2 ? lane / 4 : lane / 4 + 8;
                const int column = lane % 4 * 2 + i % 2;
                double sum = lanes[lane]->sums[i];
                for (int k = 0; k < 16; k++) sum += left[row][k] * right[k][column];
                lanes[lane]->sums[i] = float(sum);
            }
    });
}
