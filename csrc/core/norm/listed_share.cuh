// Listed columns in the ring, where shared memory has no room for shifts of two rows
// (listed_values.cuh).
//
// The thread that has a listed column among its own takes its xhat for zero. Threads of additional
// warps add what is missing to the row's sum of w * xhat, and write the column's dx when its owner
// has. They read neighbouring values of `side`, and the column's dy once more, from the L2 cache.
#pragma once

#include "core/norm/backward_input.cuh"
#include "core/norm/staged_params.cuh"

namespace fused_norm {

// A thread holds the values of its first kHeld places, so that they can be loaded well before they
// are used, and their columns and weights, or its loads would wait for each other in every row.
template <typename X, typename Y, typename S, bool kOneWarp>
class ListedShare {
  static constexpr int kHeld = kOneWarp ? 4 : 2;

 public:
  struct Values {
    Y dy;  // as it is: to make it a float is to wait for it
    float xhat;
  };
  struct Held {
    Values at[kHeld];
  };

  // Of the places from places.x to places.y, with the other threads of the block from first_thread
  // on; of the cluster-th cluster.
  __device__ __forceinline__ ListedShare(const BackwardInput<Y, S, float>& in,
                                         const BackwardOutput<X, float>& out, int2 places,
                                         int64_t cluster, int first_thread)
      : in_(in),
        out_(out),
        own_(places.x + threadIdx.x - first_thread),
        step_(kOneWarp ? kWarpSize : blockDim.x - first_thread),
        end_(places.y),
        sums_(out.listed_sums ? out.listed_sums + cluster * in.list.room : nullptr) {
    for (int place = own_; sums_ != nullptr && place < end_; place += step()) sums_[place] = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      kept_[i] = own_ + i * step() < end_ ? column_at(own_ + i * step()) : Column{};
  }

  // Makes the xhat of these columns zero to their owners, who have staged their parameters, from
  // column first_col on.
  template <RowsLie kLie, typename Params>
  __device__ void clear(float* staged, int first_col) const {
    for (int place = own_; place < end_; place += step()) {
      const int col = in_.list.columns[1 + place] - first_col;
      staged[Params::template find<kLie>(kScale, 0, col)] = 0;
      if (Params::kRows > 0) staged[Params::template find<kLie>(kShift, 0, col)] = 0;
    }
  }

  // The values of a row that this thread holds; zero at places past the end.
  __device__ __forceinline__ Held load(int64_t row) const {
    Held held{};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int place = own_ + i * step();
      if (place < end_) held.at[i] = load(row, place, kept_[i]);
    }
    return held;
  }

  // Brings near what load() will read of `side`; dy is on its way to those who have the columns.
  __device__ __forceinline__ void prefetch(int64_t row) const {
#pragma unroll 1
    for (int place = own_; place < end_; place += step())
      asm volatile("prefetch.global.L2 [%0];" ::"l"(in_.list.side + row * in_.list.room + place));
  }

  // This thread's part of the row's sum of w * xhat. Nobody else adds to its places of the sums: an
  // atomic operation only because nothing waits for it.
  __device__ __forceinline__ float add_up(int64_t row, const Held& held) const {
    float sum = 0;
    for_each(row, held, [&](int place, const Column& column, const Values& values) {
      const float dy = static_cast<float>(values.dy);
      if (sums_ != nullptr) atomicAdd(sums_ + place, dy * values.xhat);
      sum += dy * column.weight * values.xhat;
    });
    return sum;
  }

  // Writes dx of a row, after the columns' owners.
  template <typename Gradient>
  __device__ __forceinline__ void write_dx(int64_t row, const Held& held,
                                           const Gradient& gradient) const {
    for_each(row, held, [&](int, const Column& column, const Values& values) {
      const int64_t at = row * in_.cols + column.at;
      float dx[1] = {gradient.at(static_cast<float>(values.dy) * column.weight, values.xhat)};
      if (out_.dresidual != nullptr) dx[0] += static_cast<float>(out_.dresidual[at]);
      Pack<X, 1> rounded;
      round_to(rounded, dx);
      detail::store_words<sizeof(X)>(reinterpret_cast<char*>(out_.dx + at), rounded.words);
    });
  }

  // Puts dweight of these columns in a partial row, after their owners, and begins anew.
  __device__ void write_partials(float* partials) const {
#pragma unroll 1
    for (int place = own_; place < end_; place += step()) {
      partials[in_.list.columns[1 + place]] = __ldcg(sums_ + place);
      sums_[place] = 0;
    }
  }

 private:
  __device__ __forceinline__ int step() const { return kOneWarp ? kWarpSize : step_; }
  struct Column {
    int at;
    float weight;
  };
  __device__ __forceinline__ Column column_at(int place) const {
    const int at = in_.list.columns[1 + place];
    return {at, ColumnAffine<float>{in_.weight, in_.bias, in_.weight_offset}.g(at)};
  }
  __device__ __forceinline__ Values load(int64_t row, int place, const Column& column) const {
    return {row_start(in_.dy, in_.dy_layout, row)[column.at], in_.list.xhat(row, place)};
  }
  // Calls run(place, its column, values) at each place.
  template <typename Run>
  __device__ __forceinline__ void for_each(int64_t row, const Held& held, Run run) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int place = own_ + i * step();
      if (place < end_) run(place, kept_[i], held.at[i]);
    }
#pragma unroll 1
    for (int place = own_ + kHeld * step(); place < end_; place += step()) {
      const Column column = column_at(place);
      run(place, column, load(row, place, column));
    }
  }

  const BackwardInput<Y, S, float>& in_;
  const BackwardOutput<X, float>& out_;
  int own_, step_, end_;
  float* sums_;
  Column kept_[kHeld];
};

}  // namespace fused_norm
