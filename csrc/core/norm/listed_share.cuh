// Listed columns, in kernels whose threads keep their columns.
//
// The thread that has a listed column among its own takes its xhat for zero. Others, who share the
// list, add what is missing to the row's sum of w * xhat, and write the column's dx when its owner
// has. They read neighbouring values of `side`, and the column's dy once more, from the L2 cache.
#pragma once

#include "core/norm/backward_input.cuh"
#include "core/norm/staged_params.cuh"

namespace fused_norm {

// Params: StagedParams of rows that lie so. A thread holds the values of its first kHeld places, so
// that they can be loaded well before they are used. kKeeps: of these it also keeps the columns and
// their weights, or its loads would wait for each other in every row.
template <RowsLie kLie, typename Params, int kHeld, bool kKeeps, typename X, typename Y, typename S>
class ListedShare {
 public:
  struct Values {
    Y dy;  // as it is: to make it a float is to wait for it
    float xhat;
  };
  struct Held {
    Values at[kHeld];
  };

  // Thread `thread` of `threads`, which share the places from `first` to `end` of the list. They
  // are the group-th of all that add up dweight of these columns. `staged`: the columns'
  // parameters, from column first_col on.
  __device__ __forceinline__ ListedShare(const BackwardInput<Y, S, float>& in,
                                         const BackwardOutput<X, float>& out, float* staged,
                                         int first_col, int thread, int threads, int first, int end,
                                         int64_t group = 0)
      : in_(in),
        out_(out),
        staged_(staged),
        first_col_(first_col),
        own_(first + thread),
        threads_(threads),
        end_(end),
        any_(first < end),
        sums_(out.listed_sums ? out.listed_sums + group * in.list.room : nullptr) {}

  // Before anything else.
  __device__ void begin() {
    for (int place = own_; sums_ != nullptr && place < end_; place += threads_) sums_[place] = 0;
#pragma unroll
    for (int i = 0; kKeeps && i < kHeld; ++i)
      kept_[i] = own_ + i * threads_ < end_ ? column_at(own_ + i * threads_) : Column{};
  }

  // Whether these threads have anything to do: the same in all of them.
  __device__ __forceinline__ bool any() const { return any_; }

  // Makes the xhat of these columns zero to their owners, who have staged their parameters.
  __device__ void clear() const {
    for (int place = own_; place < end_; place += threads_)
      Params::template clear<kLie>(staged_, column(place) - first_col_);
  }

  // The values of a row that this thread holds; zero at places past the end.
  __device__ __forceinline__ Held load(int64_t row) const {
    Held held;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int place = own_ + i * threads_;
      held.at[i] = {};
      if (place < end_) held.at[i] = load(row, place, held_column(i));
    }
    return held;
  }

  // Brings near what load() will read of `side`; dy is on its way to those who have the columns.
  __device__ __forceinline__ void prefetch(int64_t row) const {
    for (int place = own_; place < end_; place += threads_)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(in_.list.side + row * in_.list.room + place));
  }

  // This thread's part of the row's sum of w * xhat.
  __device__ __forceinline__ float add_up(int64_t row, const Held& held) const {
    float sum = 0;
    for_each(row, held, [&](int place, const Column& column, const Values& values) {
      sum += add(place, column, values);
    });
    return sum;
  }

  // Writes dx of a row, after the columns' owners.
  template <typename Gradient>
  __device__ __forceinline__ void write_dx(int64_t row, const Held& held,
                                           const Gradient& gradient) const {
    for_each(row, held, [&](int, const Column& column, const Values& values) {
      write(row, column, values, gradient);
    });
  }

  // Puts dweight of these columns in a partial row, after their owners, and begins anew. The sums
  // of `groups` groups follow each other, and this is the index-th; each takes a share of the
  // columns. All have met since they added anything.
  __device__ void write_partials(float* partials, int index = 0, int groups = 1) const {
    const int pitch = in_.list.room;
    for (int place = own_ + index * threads_; place < end_; place += groups * threads_) {
      float sum = 0;
      for (int g = 0; g < groups; ++g) sum += __ldcg(sums_ + (g - index) * pitch + place);
      partials[column(place)] = sum;
      if (groups == 1) sums_[place] = 0;
    }
  }

 private:
  struct Column {
    int at;
    float weight;
  };
  __device__ __forceinline__ int column(int place) const { return in_.list.columns[1 + place]; }
  __device__ __forceinline__ Column column_at(int place) const {
    const int at = column(place);
    return {at, Params::template weight_of<kLie>(in_, staged_, first_col_, at)};
  }
  // Of a thread's i-th place.
  __device__ __forceinline__ Column held_column(int i) const {
    return kKeeps ? kept_[kKeeps ? i : 0] : column_at(own_ + i * threads_);
  }

  __device__ __forceinline__ Values load(int64_t row, int place, const Column& column) const {
    return {row_start(in_.dy, in_.dy_layout, row)[column.at], in_.list.xhat(row, place)};
  }
  // Calls run(place, its column, values) at each place.
  template <typename Run>
  __device__ __forceinline__ void for_each(int64_t row, const Held& held, Run run) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int place = own_ + i * threads_;
      if (place < end_) run(place, held_column(i), held.at[i]);
    }
    for (int place = own_ + kHeld * threads_; place < end_; place += threads_) {
      const Column column = column_at(place);
      run(place, column, load(row, place, column));
    }
  }

  // Nobody else adds to this place: an atomic operation only because nothing waits for it.
  __device__ __forceinline__ float add(int place, const Column& column,
                                       const Values& values) const {
    const float dy = static_cast<float>(values.dy);
    if (sums_ != nullptr) atomicAdd(sums_ + place, dy * values.xhat);
    return dy * column.weight * values.xhat;
  }

  template <typename Gradient>
  __device__ __forceinline__ void write(int64_t row, const Column& column, const Values& values,
                                        const Gradient& gradient) const {
    const int64_t at = row * in_.cols + column.at;
    float dx[1] = {gradient.at(static_cast<float>(values.dy) * column.weight, values.xhat)};
    if (out_.dresidual != nullptr) dx[0] += static_cast<float>(out_.dresidual[at]);
    Pack<X, 1> rounded;
    round_to(rounded, dx);
    detail::store_words<sizeof(X)>(reinterpret_cast<char*>(out_.dx + at), rounded.words);
  }

  const BackwardInput<Y, S, float>& in_;
  const BackwardOutput<X, float>& out_;
  float* staged_;
  int first_col_, own_, threads_, end_;
  bool any_;
  float* sums_;
  Column kept_[kKeeps ? kHeld : 1];
};

}  // namespace fused_norm
