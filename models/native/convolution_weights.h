// Weights of a group convolution as its kernels read them, and back.
//
// As they are: [channels, 16, kernel, kernel].
// Packed: [groups, points, 16 that are read, 16 that are written].
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__SSE__)
#include <immintrin.h>
#endif

#include "convolution.h"
#include "vectors.h"

// Each row of a block of 4 x 4 numbers becomes a column.
struct Rows {
    const float* row[4];
};
struct Columns {
    float* column[4];
};

inline void transpose(const Rows& from, const Columns& to) {
#if defined(__SSE__)
    __m128 a = _mm_loadu_ps(from.row[0]);
    __m128 b = _mm_loadu_ps(from.row[1]);
    __m128 c = _mm_loadu_ps(from.row[2]);
    __m128 d = _mm_loadu_ps(from.row[3]);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to.column[0], a);
    _mm_storeu_ps(to.column[1], b);
    _mm_storeu_ps(to.column[2], c);
    _mm_storeu_ps(to.column[3], d);
#else
    for (int row = 0; row < 4; row++)
        for (int column = 0; column < 4; column++) to.column[column][row] = from.row[row][column];
#endif
}

// Calls work(first) for blocks of four of `count` numbers, 4 or more; the last may overlap the one
// before.
template <class Work>
inline void for_fours(int64_t count, Work work) {
    for (int64_t begin = 0; begin < count; begin += 4) work(std::min(begin, count - 4));
}

// backward: for the input's gradient, whose packed weights have the two sixteens exchanged.
inline void pack_weights(const Convolution& conv,
                         const float* weights,
                         bool backward,
                         float* packed) {
    const int64_t points = conv.points();
#pragma omp parallel for num_threads(conv.threads) schedule(static)
    for (int64_t group = 0; group < conv.groups(); group++)
        for (int64_t line = 0; line < GROUP; line++) {
            // [16 lanes, points] becomes [points, 16 lanes].
            const int64_t line_pitch = backward ? GROUP * points : points;
            const int64_t lane_pitch = backward ? points : GROUP * points;
            const float* from = weights + group * MATRIX * points + line * line_pitch;
            float* to = packed + group * points * MATRIX + line * GROUP;
            for_fours(points, [&](int64_t point) {
                for (int64_t lane = 0; lane < GROUP; lane += 4) {
                    Rows rows;
                    Columns columns;
                    for (int next = 0; next < 4; next++) {
                        rows.row[next] = from + (lane + next) * lane_pitch + point;
                        columns.column[next] = to + (point + next) * MATRIX + lane;
                    }
                    transpose(rows, columns);
                }
            });
        }
}

// Adds up parts, [parts, groups, points, 16 in, 16 out], to weights, [channels, 16, kernel,
// kernel].
inline void unpack_weights(const Convolution& conv,
                           const float* packed,
                           int64_t parts,
                           float* weights) {
    const int64_t points = conv.points();
    const int64_t part_elements = conv.groups() * points * MATRIX;
#pragma omp parallel for num_threads(conv.threads) schedule(static)
    for (int64_t group = 0; group < conv.groups(); group++)
        for (int64_t in = 0; in < GROUP; in++) {
            // Over parts.
            float sums[MAX_KERNEL * MAX_KERNEL][GROUP];
            for (int64_t point = 0; point < points; point++)
                for (int part = 0; part < PARTS; part++) {
                    const float* first =
                        packed + (group * points + point) * MATRIX + in * GROUP + part * WIDTH;
                    Values sum = load<WIDTH>(first);
                    for (int64_t other = 1; other < parts; other++)
                        sum += load<WIDTH>(first + other * part_elements);
                    store<WIDTH>(sums[point] + part * WIDTH, sum);
                }
            // [points, 16 out] becomes [16 out, points].
            float* to = weights + (group * MATRIX + in) * points;
            for (int64_t out = 0; out < GROUP; out += 4)
                for_fours(points, [&](int64_t point) {
                    Rows rows;
                    Columns columns;
                    for (int next = 0; next < 4; next++) {
                        rows.row[next] = sums[point + next] + out;
                        columns.column[next] = to + (out + next) * GROUP * points + point;
                    }
                    transpose(rows, columns);
                });
        }
}
