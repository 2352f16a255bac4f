// Products of matrices of float32 or float64. The bits of a row of the result do not depend on the other rows.
#pragma once

#include "wide.h"

namespace {

constexpr long BLOCK = 16;  // the rows of a matrix are padded to a multiple of this length
constexpr long TILE = 8;    // the number of rows of a matrix is padded to a multiple of this

constexpr long filled(long count, long block = BLOCK) { return (count + block - 1) / block * block; }

template <class T>
struct Vector;
template <>
struct Vector<float> {
    typedef vec Type;
    typedef loose Loose;
};
template <>
struct Vector<double> {
    typedef dvec Type;
    typedef loose_double Loose;
};
template <class T>
constexpr int WIDTH = sizeof(vec) / sizeof(T);

template <class T>
INLINE typename Vector<T>::Type load_some(const T* from) {
    return *reinterpret_cast<const typename Vector<T>::Loose*>(from);
}
template <class T>
INLINE void store_some(T* to, typename Vector<T>::Type value) {
    *reinterpret_cast<typename Vector<T>::Loose*>(to) = value;
}

// An array of numbers with an alignment of 64 bytes.
template <class T>
class Numbers {
  public:
    // Returns memory for at least ``count`` numbers, which are not initialised.
    T* at_least(long count) {
        if (long(blocks_.size()) * PER_BLOCK < count) blocks_.resize((count + PER_BLOCK - 1) / PER_BLOCK);
        return reinterpret_cast<T*>(blocks_.data());
    }

  private:
    struct alignas(64) Block {
        T values[64 / sizeof(T)];
    };
    static constexpr long PER_BLOCK = 64 / sizeof(T);
    std::vector<Block> blocks_;
};

// The arguments of the product start + sum_k left[row][k] * right[k][column]. The terms are added from the first to the last k,
// with one rounding for each term, on any processor.
template <class T>
struct Product {
    const T* left;
    long left_row, left_step;  // the distances in ``left`` between rows, and between consecutive k
    const T* right;
    long right_step;
    long depth;
    const T* start;  // null: zero
    long start_row;  // the distance between rows of ``start``; 0: all rows have the same start
};

template <class T, int ROWS, int VECTORS, class Take>
INLINE void product_tile(const Product<T>& of, long row, long column, const Take& take) {
    typename Vector<T>::Type sums[ROWS][VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            sums[r][v] = of.start ? load_some(of.start + (row + r) * of.start_row + column + v * WIDTH<T>)
                                  : typename Vector<T>::Type{};
    const T *left = of.left + row * of.left_row, *right = of.right + column;
    for (long k = 0; k < of.depth; k++, left += of.left_step, right += of.right_step) {
        typename Vector<T>::Type values[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) values[v] = load_some(right + v * WIDTH<T>);
        UNROLL for (int r = 0; r < ROWS; r++) {
            // The code subtracts zero, because the compiler may remove x - 0. It may not remove x + 0, which turns -0 into 0.
            const auto factor = left[r * of.left_row] - typename Vector<T>::Type{};
            UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = fused(factor, values[v], sums[r][v]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) take(row + r, column + v * WIDTH<T>, sums[r][v]);
}

template <class T, int VECTORS, class Take>
NOINLINE void product_columns(const Product<T>& of, long rows, long column, const Take& take) {
    constexpr int ROWS = REGISTERS / 4;
    for (long row = 0; row < rows; row += ROWS) product_tile<T, ROWS, VECTORS>(of, row, column, take);
}

// Calls ``take(row, column, vector)`` for all vectors of the product. ``rows``: a multiple of TILE; ``columns``: of WIDTH.
template <class T, class Take>
void multiply_rows(const Product<T>& of, long rows, long columns, const Take& take) {
    for (long column = 0; column < columns;) {
        const long left = (columns - column) / WIDTH<T>;
        if (left == 1) product_columns<T, 1>(of, rows, column, take), column += WIDTH<T>;
        else if (left == 2 || left == 4) product_columns<T, 2>(of, rows, column, take), column += 2 * WIDTH<T>;
        else product_columns<T, 3>(of, rows, column, take), column += 3 * WIDTH<T>;
    }
}

}  // namespace
