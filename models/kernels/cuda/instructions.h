// Instructions of GPUs of compute capability 8.0 or higher that C++ has no words for.
//
// A test's simulator has functions of the same names for a CPU. BFLOAT16 is 1 or 0 (float16).
#pragma once

#define DEVICE __device__ __forceinline__

// Shared memory of the block, whose size the launch gives.
DEVICE char* shared_memory() {
    extern __shared__ __align__(16) char memory[];
    return memory;
}

DEVICE unsigned shared_address(const void* in_shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(in_shared));
}

// Copies 16 bytes to shared memory while the thread goes on; zeros unless `wanted`.
DEVICE void copy_async(void* to_shared, const void* from, bool wanted) {
    const int bytes = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)),
                 "l"(from), "r"(bytes)
                 : "memory");
}

// Ends a group of the thread's copies; it may have none.
DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until of the thread's groups of copies only the last PENDING are under way.
template <int PENDING>
DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads four matrices of 8 rows of 16 bytes. Lane l gives the address of row l % 8 of matrix l / 8,
// and gets the elements 2 (l % 4) and the next of row l / 4 of each.
DEVICE void load_matrices(unsigned (&matrices)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(shared_address(row)));
}

// The same of the transposed matrices: elements l / 4 of row 2 (l % 4) and of the next.
DEVICE void load_transposed(unsigned (&matrices)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(shared_address(row)));
}

// The same of two matrices, with rows of lanes 0 to 15.
DEVICE void load_transposed(unsigned (&matrices)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(matrices[0]), "=r"(matrices[1])
                 : "r"(shared_address(row)));
}

// sums += a b: [16, 8] += [16, 16] [16, 8], all 32 lanes together. Lane l has, in this order, of
// sums: rows l / 4 and l / 4 + 8, in each columns 2 (l % 4) and the next; of a: these rows, columns
// 2 (l % 4) and the next, then the columns 8 further; of b: rows 2 (l % 4) and the next, then those
// 8 further, of column l / 4.
DEVICE void multiply_add(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if BFLOAT16
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Two numbers rounded to half precision, the first in the lower bits.
DEVICE unsigned rounded(float low, float high) {
    unsigned pair;
#if BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

// A number of half precision, given by its bits.
DEVICE float widened(unsigned short bits) {
#if BFLOAT16
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}
