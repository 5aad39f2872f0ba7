// Packs: the unit of memory access. A pack is N consecutive elements of a row, up to 16 bytes.
// Column c of a row belongs to pack c / N whatever the row's alignment, so that a row's arithmetic
// never depends on where it lies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/common/types.h"

namespace fused_norm {

// kBytes (4, 8 or 16; 2 for a single element) as registers hold them.
template <int kBytes>
struct Words {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  uint32_t at[kBytes / 4];
};
template <>
struct Words<2> {
  uint16_t at[1];
};

// N elements of type T, as words: 16-bit elements taken apart would fill a register each.
template <typename T, int N>
struct Pack {
  Words<sizeof(T) * N> words;
};

// A pack in shared memory: one access.
template <typename T, int N>
struct alignas(sizeof(T) * N) AlignedPack {
  Pack<T, N> pack;
};

template <typename T>
constexpr DType kDTypeOf = std::is_same_v<T, __half>          ? DType::kFloat16
                           : std::is_same_v<T, __nv_bfloat16> ? DType::kBFloat16
                           : std::is_same_v<T, float>         ? DType::kFloat32
                                                              : DType::kFloat64;

// The type of a row's arithmetic: fp32, or fp64 for fp64 data.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

namespace detail {

template <typename To, typename From>
__device__ __forceinline__ To bit_copy(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

__device__ __forceinline__ float2 to_floats(uint32_t pair, __half) {
  return __half22float2(bit_copy<__half2>(pair));
}
// A bf16 is the upper half of an fp32: one instruction each.
__device__ __forceinline__ float2 to_floats(uint32_t pair, __nv_bfloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ uint32_t round_pair(float a, float b, __half) {
  return bit_copy<uint32_t>(__floats2half2_rn(a, b));
}
__device__ __forceinline__ uint32_t round_pair(float a, float b, __nv_bfloat16) {
  return bit_copy<uint32_t>(__floats2bfloat162_rn(a, b));
}

}  // namespace detail

template <typename T, int N>
__device__ __forceinline__ void unpack(const Pack<T, N>& pack, Accumulator<T> (&out)[N]) {
  if constexpr (sizeof(T) == 2 && N == 1) {
    out[0] = static_cast<float>(detail::bit_copy<T>(pack.words));
  } else if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 pair = detail::to_floats(pack.words.at[i], T());
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    }
  } else {
    memcpy(out, &pack, sizeof(pack));
  }
}

// Rounds to nearest even.
template <typename T, int N, typename A>
__device__ __forceinline__ void round_to(Pack<T, N>& pack, const A (&in)[N]) {
  if constexpr (sizeof(T) == 2 && N == 1) {
    pack.words = detail::bit_copy<Words<2>>(T(in[0]));
  } else if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      pack.words.at[i] = detail::round_pair(in[2 * i], in[2 * i + 1], T());
    }
  } else {
    static_assert(std::is_same_v<T, A>);
    memcpy(&pack, in, sizeof(pack));
  }
}

namespace detail {

// The kBytes bytes that start `shift` (< kBytes) bytes into the concatenation of `low` and `high`.
template <int kBytes>
__device__ __forceinline__ Words<kBytes> shifted_bytes(const Words<kBytes>& low,
                                                       const Words<kBytes>& high, unsigned shift) {
  constexpr int kWords = kBytes / 4;
  uint32_t words[2 * kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = low.at[i];
    words[kWords + i] = high.at[i];
  }
  // Whole words by a binary choice (a register array has no run-time index), the rest by a funnel
  // shift.
#pragma unroll
  for (int step = kWords / 2; step > 0; step /= 2) {
    const bool take = (shift / 4) & step;
#pragma unroll
    for (int i = 0; i + step < 2 * kWords; ++i) words[i] = take ? words[i + step] : words[i];
  }
  Words<kBytes> out;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    out.at[i] = __funnelshift_r(words[i], words[i + 1], (shift % 4) * 8);
  }
  return out;
}

// The word that holds byte `byte`, by shifting all words down: an index would move them to local
// memory.
template <int kBytes>
__device__ __forceinline__ uint32_t word_at(const Words<kBytes>& words, int byte) {
  return shifted_bytes<kBytes>(words, words, byte & (kBytes - 4)).at[0];
}

// One access of kBytes through the read-only path.
template <int kBytes>
__device__ __forceinline__ Words<kBytes> load_words(const char* address) {
  if constexpr (kBytes == 16) {
    return bit_copy<Words<16>>(__ldg(reinterpret_cast<const uint4*>(address)));
  } else if constexpr (kBytes == 8) {
    return bit_copy<Words<8>>(__ldg(reinterpret_cast<const uint2*>(address)));
  } else if constexpr (kBytes == 2) {
    return {__ldg(reinterpret_cast<const uint16_t*>(address))};
  } else {
    return bit_copy<Words<4>>(__ldg(reinterpret_cast<const uint32_t*>(address)));
  }
}

// The same for what is read once, which leaves the first-level cache to the parameters.
template <int kBytes>
__device__ __forceinline__ Words<kBytes> load_streamed(const char* address) {
  Words<kBytes> words;
  if constexpr (kBytes == 16) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.at[0]), "=r"(words.at[1]), "=r"(words.at[2]), "=r"(words.at[3])
                 : "l"(address));
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words.at[0]), "=r"(words.at[1])
                 : "l"(address));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(words.at[0]) : "l"(address));
  }
  return words;
}

// The first `count` of N elements, and zeros.
template <typename T, int N>
__device__ __noinline__ Words<sizeof(T) * N> load_elements(const char* address, int count) {
  T elements[N] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) elements[i] = __ldg(reinterpret_cast<const T*>(address) + i);
  }
  return bit_copy<Words<sizeof(T) * N>>(elements);
}

template <int kBytes>
__device__ __forceinline__ void store_words(char* address, const Words<kBytes>& words) {
  if constexpr (kBytes == 16) {
    *reinterpret_cast<uint4*>(address) = bit_copy<uint4>(words);
  } else if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(address) = bit_copy<uint2>(words);
  } else if constexpr (kBytes == 2) {
    *reinterpret_cast<uint16_t*>(address) = words.at[0];
  } else {
    *reinterpret_cast<uint32_t*>(address) = bit_copy<uint32_t>(words);
  }
}

// The same for what nobody reads soon.
template <int kBytes>
__device__ __forceinline__ void store_streamed(char* address, const Words<kBytes>& words) {
  if constexpr (kBytes == 16) {
    __stcs(reinterpret_cast<uint4*>(address), bit_copy<uint4>(words));
  } else if constexpr (kBytes == 8) {
    __stcs(reinterpret_cast<uint2*>(address), bit_copy<uint2>(words));
  } else {
    __stcs(reinterpret_cast<uint32_t*>(address), bit_copy<uint32_t>(words));
  }
}

}  // namespace detail

// Makes the compiler forget the elements that were unpacked, by an exclusive or with a zero that it
// cannot know: to unpack 16-bit elements once more is cheaper than to keep each in a register of
// its own, which it would do otherwise, up to spilling them. For kernels of two-dimensional blocks.
template <typename T, int N, int kPacks>
__device__ __forceinline__ void forget_elements(Pack<T, N> (&packs)[kPacks]) {
  if constexpr (sizeof(T) == 2) {
    const uint32_t zero = blockDim.z - 1;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) packs[p].words.at[i] ^= zero;
    }
  }
}

// Sets the elements of a pack from `count` on to -inf, which a maximum and a sum of exponentials
// pass over. A regular row has whole packs in it or none of a pack.
template <bool kRegular, typename T, int N>
__device__ __forceinline__ void pad_with_lowest(Pack<T, N>& pack, int count) {
  if (count >= N) return;
  if constexpr (sizeof(T) == 8) {
    static_assert(N == 2);
    Words<16>& words = pack.words;
    if (count <= 0) words.at[0] = 0, words.at[1] = 0xfff00000u;
    words.at[2] = 0, words.at[3] = 0xfff00000u;
  } else {
    constexpr uint32_t kLowest = std::is_same_v<T, float>    ? 0xff800000u
                                 : std::is_same_v<T, __half> ? 0xfc00fc00u
                                                             : 0xff80ff80u;
    constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < N / kPerWord; ++i) {
      uint32_t& word = pack.words.at[i];
      if (kRegular || count <= i * kPerWord) {
        word = kLowest;
      } else if (kPerWord == 2 && count == i * kPerWord + 1) {
        word = (word & 0xffff) | (kLowest & 0xffff0000u);
      }
    }
  }
}

// Rows are regular when every one starts on a pack boundary and is a whole number of packs. The
// caller finds out on the host; kernels hold both forms, with the same arithmetic, and branch once.
//
// Reads packs of one row. Loads are always of aligned granules; in an irregular row a pack lies
// across two of them, and the second comes from the next lane, which loads it anyway. Columns past
// the row read as zero. Granules may reach into the memory before and after the row, but not past
// that of the last row.
template <typename T, int N, bool kRegular>
class RowReader {
  static constexpr int kBytes = sizeof(T) * N;

 public:
  // `lane` counts from 0 to `lanes` - 1 among the warp's lanes that share the row, with consecutive
  // packs. `rows_follow`: at least a pack's memory lies between the row's end and that of the last
  // row.
  __device__ RowReader(const T* row, int cols, bool rows_follow, int lane, int lanes)
      : row_(reinterpret_cast<const char*>(row)),
        cols_(cols),
        rows_follow_(rows_follow),
        lane_(lane),
        lanes_(lanes),
        shift_(kRegular ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(row) % kBytes)) {}

  // Packs as they are loaded: the granules in which they start, and for the last lane those after
  // them.
  template <int kPacks>
  struct Fetched {
    Words<kBytes> granules[kPacks], edges[kRegular ? 1 : kPacks];
  };

  // Loads the packs at columns col, col + step, ..., all of them in flight at once.
  template <int kPacks>
  __device__ __forceinline__ void fetch(Fetched<kPacks>& fetched, int col, int step) const {
    if (kRegular || rows_follow_) {
      fetch_granules<false>(fetched, col, step);
    } else {
      fetch_granules<true>(fetched, col, step);
    }
  }

  // Makes packs of what was fetched. All lanes of a warp take part.
  template <int kPacks>
  __device__ __forceinline__ void extract(const Fetched<kPacks>& fetched,
                                          Pack<T, N> (&packs)[kPacks], int col, int step) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Words<kBytes>& low = fetched.granules[p];
      if constexpr (kRegular) {
        packs[p].words = low;
      } else {
        Words<kBytes> high;
#pragma unroll
        for (int i = 0; i < kBytes / 4; ++i) {
          high.at[i] = __shfl_down_sync(0xffffffffu, low.at[i], 1, lanes_);
          if (lane_ == lanes_ - 1) high.at[i] = fetched.edges[p].at[i];
        }
        packs[p] = finish(detail::shifted_bytes<kBytes>(low, high, shift_), col + p * step);
      }
    }
  }

  template <int kPacks>
  __device__ __forceinline__ void load(Pack<T, N> (&packs)[kPacks], int col, int step) const {
    Fetched<kPacks> fetched;
    fetch(fetched, col, step);
    extract(fetched, packs, col, step);
  }

  // The same for a run: packs at columns col, col + lanes * N, ..., so that those of the warp's
  // lanes are all neighbours and one granule more completes them.
  template <int kPacks>
  struct FetchedRun {
    Words<kBytes> granules[kPacks], edge;
  };

  template <int kPacks>
  __device__ __forceinline__ void fetch_run(FetchedRun<kPacks>& fetched, int col) const {
    if (kRegular || rows_follow_) {
      fetch_run_granules<false>(fetched, col);
    } else {
      fetch_run_granules<true>(fetched, col);
    }
  }

  template <int kPacks>
  __device__ __forceinline__ void extract_run(const FetchedRun<kPacks>& fetched,
                                              Pack<T, N> (&packs)[kPacks], int col) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Words<kBytes>& low = fetched.granules[p];
      if constexpr (kRegular) {
        packs[p].words = low;
      } else {
        // Each lane needs the granule after its own: the next lane's, or the first lane's next.
        const Words<kBytes>& after = p + 1 < kPacks ? fetched.granules[p + 1] : fetched.edge;
        const int next = lane_ + 1 == lanes_ ? 0 : lane_ + 1;
        Words<kBytes> high;
#pragma unroll
        for (int i = 0; i < kBytes / 4; ++i) {
          high.at[i] = __shfl_sync(0xffffffffu, lane_ == 0 ? after.at[i] : low.at[i], next, lanes_);
        }
        packs[p] = finish(detail::shifted_bytes<kBytes>(low, high, shift_), col + p * lanes_ * N);
      }
    }
  }

  template <int kPacks>
  __device__ __forceinline__ void load_run(Pack<T, N> (&packs)[kPacks], int col) const {
    FetchedRun<kPacks> fetched;
    fetch_run(fetched, col);
    extract_run(fetched, packs, col);
  }

 private:
  template <bool kGuarded, int kPacks>
  __device__ __forceinline__ void fetch_run_granules(FetchedRun<kPacks>& fetched, int col) const {
    const int step = lanes_ * N;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) fetched.granules[p] = granule<kGuarded>(col + p * step, 0);
    if constexpr (!kRegular) {
      if (lane_ == 0 && shift_ != 0) fetched.edge = granule<kGuarded>(col + kPacks * step, 0);
    }
  }

  template <bool kGuarded, int kPacks>
  __device__ __forceinline__ void fetch_granules(Fetched<kPacks>& fetched, int col,
                                                 int step) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) fetched.granules[p] = granule<kGuarded>(col + p * step, 0);
    if constexpr (!kRegular) {
      if (lane_ != lanes_ - 1 || shift_ == 0) return;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) fetched.edges[p] = granule<kGuarded>(col + p * step, kBytes);
    }
  }

  // The granule `offset` bytes after the one in which the pack at `col` starts, if the row reaches
  // it. Guarded, nothing past the row is read.
  template <bool kGuarded>
  __device__ __forceinline__ Words<kBytes> granule(int col, int offset) const {
    Words<kBytes> words{};
    const int first = col + (offset - shift_) / static_cast<int>(sizeof(T));
    if (first >= cols_) return words;
    const char* const start = row_ + static_cast<int64_t>(first) * sizeof(T);
    if (!kGuarded || first + N <= cols_) {
      words = detail::load_words<kBytes>(start);
    } else if (cols_ > 0) {
      words = detail::load_elements<T, N>(start, cols_ - first);
    }
    return words;
  }

  // Sets the columns past the row to zero.
  __device__ __forceinline__ Pack<T, N> finish(Words<kBytes> words, int col) const {
    const int bytes = (cols_ - col) * static_cast<int>(sizeof(T));
    if (cols_ - col < N) {
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) {
        words.at[i] = bytes >= 4 * i + 4 ? words.at[i] : bytes > 4 * i ? words.at[i] & 0xffff : 0;
      }
    }
    return {words};
  }

  const char* row_;
  int cols_;
  bool rows_follow_;
  int lane_, lanes_, shift_;
};

// Writes packs of one row; the counterpart of RowReader. All lanes that share the row in a warp
// call store() together, with consecutive packs in consecutive lanes: in a row that does not start
// on a pack boundary each lane writes the aligned granule that ends with its own first columns and
// begins with its neighbour's last ones.
template <typename T, int N, bool kRegular>
class RowWriter {
 public:
  // `lane` counts from 0 to `lanes` - 1 among the warp's lanes that share the row, `mask` names
  // those lanes.
  __device__ RowWriter(T* row, int cols, int lane, int lanes, unsigned mask)
      : row_(row),
        cols_(cols),
        lane_(lane),
        lanes_(lanes),
        shift_(kRegular ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(row) % kBytes)),
        mask_(mask) {}

  __device__ __forceinline__ void store(int col, const Pack<T, N>& pack) const {
    store_in_run(col, pack, pack, true, true);
  }

  // The same for the packs of a run (RowReader), one after the other: given this lane's previous
  // one, only the ends of the first and the last are shared with others. Both are known at compile
  // time.
  __device__ __forceinline__ void store_in_run(int col, const Pack<T, N>& pack,
                                               const Pack<T, N>& previous, bool first,
                                               bool last) const {
    const int count = cols_ - col;  // N or more: a whole pack; 0 or less: nothing
    if (kRegular || shift_ == 0) {
      if (count >= N) {
        detail::store_words<kBytes>(address(col), pack.words);
      } else if (!kRegular) {
        store_elements(col, pack, 0, count);
      }
      return;
    }
    const int head =
        (kBytes - shift_) /
        static_cast<int>(sizeof(T));  // own columns in the granule shared with the pack before
    const Words<kBytes>& own = pack.words;
    const bool has_before = !first || lane_ > 0;
    Words<kBytes> before;
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      if (first) {
        before.at[i] = __shfl_up_sync(mask_, own.at[i], 1, lanes_);
      } else {
        const bool is_last_lane = lane_ + 1 == lanes_;
        before.at[i] = __shfl_sync(mask_, is_last_lane ? previous.words.at[i] : own.at[i],
                                   lane_ == 0 ? lanes_ - 1 : lane_ - 1, lanes_);
      }
    }
    const Words<kBytes> granule = detail::shifted_bytes<kBytes>(before, own, kBytes - shift_);
    char* const start = address(col) - shift_;
    if (count >= N) {
      if (has_before) {
        detail::store_words<kBytes>(start, granule);
      } else {
        store_from(start, granule, shift_);
      }
      // The next lane writes this one's tail with its own head, if it has all of that.
      if ((last && lane_ + 1 == lanes_) || count - N < head) {
        store_to(start + kBytes, detail::shifted_bytes<kBytes>(own, own, kBytes - shift_), shift_);
      }
    } else if (count > 0) {  // the row's end
      if (has_before && count >= head) {
        detail::store_words<kBytes>(start, granule);
        store_elements(col, pack, head, count);
      } else {
        store_elements(col, pack, 0, count);
      }
    }
  }

 private:
  static constexpr int kBytes = sizeof(T) * N;

  __device__ char* address(int col) const {
    return reinterpret_cast<char*>(row_) + static_cast<int64_t>(col) * sizeof(T);
  }
  // Bytes [first, kBytes) of a granule, in pieces of 2, 4 and 8.
  __device__ __forceinline__ static void store_from(char* start, const Words<kBytes>& words,
                                                    int first) {
    if constexpr (sizeof(T) == 2) {
      if (first & 2) {
        *reinterpret_cast<uint16_t*>(start + first) =
            static_cast<uint16_t>(detail::word_at(words, first) >> 16);
        first += 2;
      }
    }
    if (first & 4) {
      *reinterpret_cast<uint32_t*>(start + first) =
          kBytes == 8 || first < 8 ? words.at[1] : words.at[kBytes / 4 - 1];
      first += 4;
    }
    if (kBytes == 16 && first == 8)
      *reinterpret_cast<uint2*>(start + 8) = {words.at[kBytes / 8], words.at[kBytes / 4 - 1]};
  }

  // Bytes [0, end) of a granule.
  __device__ __forceinline__ static void store_to(char* start, const Words<kBytes>& words,
                                                  int end) {
    if (kBytes == 16 && (end & 8)) *reinterpret_cast<uint2*>(start) = {words.at[0], words.at[1]};
    if (end & 4)
      *reinterpret_cast<uint32_t*>(start + (end & 8)) =
          kBytes == 8 || !(end & 8) ? words.at[0] : words.at[kBytes / 8];
    if constexpr (sizeof(T) == 2) {
      if (end & 2) {
        *reinterpret_cast<uint16_t*>(start + (end & 12)) =
            static_cast<uint16_t>(detail::word_at(words, end));
      }
    }
  }

  __device__ void store_elements(int col, const Pack<T, N>& pack, int begin, int end) const {
    T elements[N];
    memcpy(elements, &pack, sizeof(pack));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i >= begin && i < end) row_[col + i] = elements[i];
    }
  }

  T* row_;
  int cols_, lane_, lanes_, shift_;
  unsigned mask_;
};

// n / divisor, for n below 2^31.
__device__ __forceinline__ uint32_t divide(uint32_t n, const Divider& by) {
  return (__umulhi(n, by.multiplier) + n) >> by.shift;
}

// Where row `row` starts.
template <typename T>
__device__ __forceinline__ T* row_start(T* base, const RowLayout& layout, int64_t row) {
  if (layout.inner == 0) return base + row * layout.stride;
  const uint32_t index = static_cast<uint32_t>(row);
  const uint32_t outer =
      (__umulhi(index, layout.multiplier) + index) >> layout.shift;  // index / inner
  return base + outer * layout.outer_stride + (index - outer * layout.inner) * layout.stride;
}

// Whether rows after `row` reach at least `elements` further in memory.
__device__ __forceinline__ bool rows_follow(const RowLayout& layout, int64_t row, int64_t rows,
                                            int cols, int elements) {
  const int64_t stride =
      layout.inner == 0 ? layout.stride : min(layout.stride, layout.outer_stride);
  return (rows - 1 - row) * min(stride, int64_t{cols}) >= elements;
}

// N parameters of type T from column `col` (a multiple of N, in the row) on, in the accumulator's
// precision. `data` is 16-byte aligned. Zero past `cols`, which regular rows never reach.
template <typename T, bool kRegular, int N, typename A>
__device__ __forceinline__ void load_params_of(const void* data, int col, int cols, A (&out)[N]) {
  constexpr int kStep = sizeof(T) * N > 16 ? 16 / sizeof(T) : N;
  const char* const address =
      static_cast<const char*>(data) + static_cast<int64_t>(col) * sizeof(T);
#pragma unroll
  for (int first = 0; first < N; first += kStep) {
    Pack<T, kStep> pack{};
    const char* const from = address + first * sizeof(T);
    if (kRegular || col + first + kStep <= cols) {
      pack.words = detail::load_words<sizeof(T) * kStep>(from);
    } else if (col + first < cols) {
      pack.words = detail::load_elements<T, kStep>(from, cols - (col + first));
    }
    Accumulator<T> part[kStep];
    unpack(pack, part);
#pragma unroll
    for (int i = 0; i < kStep; ++i) out[first + i] = static_cast<A>(part[i]);
  }
}

// The same for a dtype known only at run time: one branch a pack, the same for every thread.
template <bool kRegular, int N, typename A>
__device__ __forceinline__ void load_params(const ParamVector& params, int col, int cols,
                                            A (&out)[N]) {
  if (params.dtype == DType::kBFloat16) {
    load_params_of<__nv_bfloat16, kRegular>(params.data, col, cols, out);
  } else if (params.dtype == DType::kFloat32) {
    load_params_of<float, kRegular>(params.data, col, cols, out);
  } else if (params.dtype == DType::kFloat16) {
    load_params_of<__half, kRegular>(params.data, col, cols, out);
  } else if constexpr (std::is_same_v<A, double>) {
    load_params_of<double, kRegular>(params.data, col, cols, out);
  }
}

}  // namespace fused_norm
