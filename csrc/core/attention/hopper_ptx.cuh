// Instructions of Hopper chips that C++ has no name for: matrix products of a warpgroup (wgmma),
// tiles copied through tensor maps (TMA), registers moved between warpgroups, and barriers.
// Compiled for sm_90a alone.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/attention/instructions.cuh"
#include "core/common/bulk_copy.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm::hopper {

// One of the arrivals that init() counted.
__device__ __forceinline__ void arrive(CopyBarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}
// An arrival that comes when the thread's copies by copy_first() so far are there. The thread goes
// on at once; before it exits it calls wait_for_all_copies().
__device__ __forceinline__ void arrive_behind_copies(CopyBarrier& barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
      : "memory");
}
__device__ __forceinline__ void wait_for_all_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Barriers of a ring of slots: so many arrivals fill one, so many readers leave it.
template <int kStages>
__device__ __forceinline__ void init_ring(CopyBarrier (&full)[kStages],
                                          CopyBarrier (&empty)[kStages], int fillers, int readers) {
  for (int slot = 0; slot < kStages; ++slot) {
    full[slot].init(fillers);
    empty[slot].init(readers);
  }
}

// Counts as one that meets at a named barrier (row_group.cuh), and does not wait.
__device__ __forceinline__ void arrive_at(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A warpgroup gives registers back, or takes more until it has that many a thread. All its warps
// call this, in a kernel whose launch bounds fix its registers.
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A tile of kRows x kColumns 16-bit elements in shared memory, as TMA writes it and wgmma reads it:
// panels of 64 columns (32 where kColumns is no multiple of 64), one after the other, whose rows of
// 128 (64) bytes are swizzled: their 16-byte parts change places by the row's index. A tile starts
// at a multiple of 1024 bytes.
template <int kRows_, int kColumns_>
struct SharedTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kPanelColumns = kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kPanels = kColumns / kPanelColumns;
  static constexpr int kRowBytes = 2 * kPanelColumns;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(kColumns % kPanelColumns == 0 && kRows % 8 == 0);

  // What wgmma wants to know of an operand: address, distances and swizzle.
  static constexpr uint64_t kForm =
      (uint64_t{8 * kRowBytes / 16} << 32) | (uint64_t{kRowBytes == 128 ? 1 : 2} << 62);

  // Operands are descriptors; block `step` of 16 of the sum is a constant further than block 0.
  // Rows of the tile are the operand's rows (A) or columns (B), from `first_row` on, a multiple of
  // 8; the sum goes along them.
  static __device__ __forceinline__ uint64_t along_rows(uint32_t tile, int first_row) {
    const uint32_t at = tile + first_row * kRowBytes;
    return kForm | (uint64_t{1} << 16) | ((at & 0x3FFFF) >> 4);
  }
  static __device__ constexpr uint64_t row_step(int step) {
    constexpr int kSteps = kPanelColumns / 16;
    return (step / kSteps * kPanelBytes + step % kSteps * 32) / 16;
  }
  // The sum goes down the tile's rows: the operand is the tile's transpose.
  static __device__ __forceinline__ uint64_t down_columns(uint32_t tile) {
    return kForm | (uint64_t{kPanelBytes / 16} << 16) | ((tile & 0x3FFFF) >> 4);
  }
  static __device__ constexpr uint64_t column_step(int step) { return step * kRowBytes; }
};

// Starts the copy of a tile's panels from row `row` of (head, batch) on. Elements beyond the tensor
// become zeros and count too. One thread; the barrier expects Tile::kBytes.
template <typename Tile>
__device__ __forceinline__ void load_tile(uint32_t tile, const CUtensorMap* map,
                                          CopyBarrier& barrier, int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(tile + panel * Tile::kPanelBytes),
        "l"(map), "r"(shared_address(&barrier)), "r"(panel * Tile::kPanelColumns), "r"(row),
        "r"(head), "r"(batch)
        : "memory");
  }
}

// As load_tile(): fp32 numbers from (row, column) on, as many as the map's box has. `column` is a
// multiple of four: of another one the copy is an illegal instruction.
__device__ __forceinline__ void load_floats(void* to, const CUtensorMap* map, CopyBarrier& barrier,
                                            int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(&barrier)), "r"(column), "r"(row)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Adds fp32 numbers in shared memory to those in global memory, as store_bulk() (bulk_copy.cuh)
// stores them.
__device__ __forceinline__ void add_bulk(float* to, const void* from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(shared_address(from)), "r"(bytes)
      : "memory");
}
// Until the thread's bulk stores and additions are in global memory.
__device__ __forceinline__ void wait_for_bulk_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// A counter in global memory. To count up releases what the thread stored, copies in bulk too. To
// wait for a count acquires what others released; so does a count that was read early, by the fence
// of the thread's next count_up(). The wait has no fence: it would also wait until the thread's own
// last count is in memory.
__device__ __forceinline__ uint32_t read_count(const uint32_t* counter) {
  uint32_t count;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}
__device__ __forceinline__ void count_up(uint32_t* counter) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void wait_for_count(const uint32_t* counter, uint32_t count) {
  uint32_t found;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  } while (found < count);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Four 8 x 8 blocks of 16-bit elements, as products have them in registers, to shared memory. Lane
// i gives the address of 8 elements, of row i % 8 of block i / 8.
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t* blocks) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(blocks[0]), "r"(blocks[1]), "r"(blocks[2]), "r"(blocks[3])
               : "memory");
}

// Matrix products of a warpgroup: D (64 x N, fp32) += A (64 x 16) B (16 x N), asynchronously, by
// 128 threads of four warps, the first a multiple of four. Warp w of the group has rows 16 w to 16
// w + 15 of D; element i of a thread is row 16 w + lane / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2
// (lane % 4) + i % 2. Neighbours 8 k to 8 k + 7, rounded to 16 bit and packed, are A's registers of
// the block k of the sum.
//
// fence() stands between other uses of the registers and the products; commit() ends a batch;
// wait_products<n>() until no more than the last n batches are under way. Until then their
// registers are left alone; hold() keeps the compiler from moving uses of them across the wait.

__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
template <int kCount>
__device__ __forceinline__ void hold(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
// The values are no longer needed: the next product gives others.
template <int kCount>
__device__ __forceinline__ void forget(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(values[i]));
}

// A number that all lanes have. Operands of products lie in uniform registers; a value that the
// compiler does not know to be the same in all lanes is moved there before each product, and with
// wide tiles that takes as long as the product. kTell: tells the compiler.
template <bool kTell>
__device__ __forceinline__ int uniform(int number) {
  return kTell ? __shfl_sync(~0u, number, 0) : number;
}

// D's registers in the assembly, and what they are.
#define FUSED_NORM_R32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FUSED_NORM_R64 \
  FUSED_NORM_R32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FUSED_NORM_R80 FUSED_NORM_R64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FUSED_NORM_R96 FUSED_NORM_R80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FUSED_NORM_R112 FUSED_NORM_R96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FUSED_NORM_R128 FUSED_NORM_R112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define FUSED_NORM_R192                                              \
  FUSED_NORM_R128                                                    \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define FUSED_NORM_R256                                                          \
  FUSED_NORM_R192                                                                \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FUSED_NORM_8(i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FUSED_NORM_D32 FUSED_NORM_8(0), FUSED_NORM_8(8)
#define FUSED_NORM_D64 FUSED_NORM_D32, FUSED_NORM_8(16), FUSED_NORM_8(24)
#define FUSED_NORM_D80 FUSED_NORM_D64, FUSED_NORM_8(32)
#define FUSED_NORM_D96 FUSED_NORM_D80, FUSED_NORM_8(40)
#define FUSED_NORM_D112 FUSED_NORM_D96, FUSED_NORM_8(48)
#define FUSED_NORM_D128 FUSED_NORM_D112, FUSED_NORM_8(56)
#define FUSED_NORM_D192 \
  FUSED_NORM_D128, FUSED_NORM_8(64), FUSED_NORM_8(72), FUSED_NORM_8(80), FUSED_NORM_8(88)
#define FUSED_NORM_D256 \
  FUSED_NORM_D192, FUSED_NORM_8(96), FUSED_NORM_8(104), FUSED_NORM_8(112), FUSED_NORM_8(120)

// D = A B where not `accumulate`, of B a tile's rows, or kDown down_columns(). shared(): A is such
// an operand too. registers(): A is registers. The indices of operands after D's registers, i0 to
// i6, are N / 2 and on.
template <typename T, int N>
struct Product;
#define FUSED_NORM_PRODUCT(T, type, n, i0, i1, i2, i3, i4, i5, i6)                               \
  template <>                                                                                    \
  struct Product<T, n> {                                                                         \
    template <bool kDown>                                                                        \
    static __device__ __forceinline__ void shared(float (&d)[n / 2], uint64_t left,              \
                                                  uint64_t right, bool accumulate) {             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2                                      \
                   ", 0;\n"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type               \
                   " {" FUSED_NORM_R##n "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i3 ";\n}" \
                   : FUSED_NORM_D##n                                                             \
                   : "l"(left), "l"(right), "r"(static_cast<int>(accumulate)), "n"(kDown));      \
    }                                                                                            \
    template <bool kDown>                                                                        \
    static __device__ __forceinline__ void registers(float (&d)[n / 2], const uint32_t* left,    \
                                                     uint64_t right, bool accumulate) {          \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5                                      \
                   ", 0;\n"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type               \
                   " {" FUSED_NORM_R##n "}, {%" #i0 ",%" #i1 ",%" #i2 ",%" #i3 "}, %" #i4        \
                                        ", p, 1, 1, %" #i6 ";\n}"                                \
                   : FUSED_NORM_D##n                                                             \
                   : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right),         \
                     "r"(static_cast<int>(accumulate)), "n"(kDown));                             \
    }                                                                                            \
  };
#define FUSED_NORM_PRODUCTS(...)                 \
  FUSED_NORM_PRODUCT(__half, "f16", __VA_ARGS__) \
  FUSED_NORM_PRODUCT(__nv_bfloat16, "bf16", __VA_ARGS__)
FUSED_NORM_PRODUCTS(32, 16, 17, 18, 19, 20, 21, 22)
FUSED_NORM_PRODUCTS(64, 32, 33, 34, 35, 36, 37, 38)
FUSED_NORM_PRODUCTS(80, 40, 41, 42, 43, 44, 45, 46)
FUSED_NORM_PRODUCTS(96, 48, 49, 50, 51, 52, 53, 54)
FUSED_NORM_PRODUCTS(112, 56, 57, 58, 59, 60, 61, 62)
FUSED_NORM_PRODUCTS(128, 64, 65, 66, 67, 68, 69, 70)
FUSED_NORM_PRODUCTS(192, 96, 97, 98, 99, 100, 101, 102)
FUSED_NORM_PRODUCTS(256, 128, 129, 130, 131, 132, 133, 134)
#undef FUSED_NORM_PRODUCTS
#undef FUSED_NORM_PRODUCT

// Starts D = A B^T of two tiles' rows, or D += A B of packed numbers and a tile, along all of the
// sum: batches of their own. `narrow`: columns of the tiles from kNarrow on are zeros, and those of
// D are left as they are. `blocks`: the first kBlocks of A, in registers.
constexpr int kNarrow = 128;
template <typename T, typename Left, typename Right, int kBlocks = 0, int kCount>
__device__ __forceinline__ void start_product(float (&d)[kCount], uint64_t left, uint64_t right,
                                              bool narrow = false,
                                              const uint32_t (*blocks)[4] = nullptr) {
  fence_products();
#pragma unroll
  for (int step = 0; step < Left::kColumns / 16; ++step) {
    if (step >= kNarrow / 16 && narrow) break;
    if (step < kBlocks) {
      Product<T, 2 * kCount>::template registers<false>(d, blocks[step],
                                                        right + Right::row_step(step), step > 0);
    } else {
      Product<T, 2 * kCount>::template shared<false>(d, left + Left::row_step(step),
                                                     right + Right::row_step(step), step > 0);
    }
  }
  commit_products();
}
// D = A^T B of two tiles, along their rows: of as many columns of each as D has.
template <typename T, typename Left, typename Right, int kCount>
__device__ __forceinline__ void start_product_down(float (&d)[kCount], uint64_t left,
                                                   uint64_t right) {
  fence_products();
#pragma unroll
  for (int step = 0; step < Left::kRows / 16; ++step) {
    Product<T, 2 * kCount>::template shared<true>(d, left + Left::column_step(step),
                                                  right + Right::column_step(step), step > 0);
  }
  commit_products();
}
// before_last(): before the last three blocks of the sum.
template <typename T, typename Right, int kCount, int kWeights, typename BeforeLast>
__device__ __forceinline__ void start_sum(float (&d)[kCount], const uint32_t (&weights)[kWeights],
                                          uint64_t right, BeforeLast before_last,
                                          bool narrow = false) {
  fence_products();
  const auto add = [&](auto& sums) {
#pragma unroll
    for (int step = 0; step < Right::kRows / 16; ++step) {
      if (step == Right::kRows / 16 - 3) before_last();
      Product<T, 2 * sizeof(sums) / sizeof(float)>::template registers<true>(
          sums, weights + 4 * step, right + Right::column_step(step), true);
    }
  };
  if (narrow) {
    add(reinterpret_cast<float(&)[std::min(kCount, kNarrow / 2)]>(d));
  } else {
    add(d);
  }
  commit_products();
}

// Elements of kBytes: one, or two that are neighbours. In this order, so that few registers wait
// for what is loaded.
template <int kBytes>
__device__ __forceinline__ void load_shared(uint32_t& to, uint32_t from) {
  if constexpr (kBytes == 1)
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(to) : "r"(from) : "memory");
  if constexpr (kBytes == 2)
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(to) : "r"(from) : "memory");
  if constexpr (kBytes == 4)
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to) : "r"(from) : "memory");
}
template <int kBytes>
__device__ __forceinline__ void load_two_shared(uint32_t (&to)[2], uint32_t from) {
  if constexpr (kBytes == 4) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(from)
                 : "memory");
  } else {
    uint32_t both;
    load_shared<2 * kBytes>(both, from);
    to[0] = both & ((1u << 8 * kBytes) - 1);
    to[1] = both >> 8 * kBytes;
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void round(uint32_t (&to)[kCount], const float (&from)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = round_pair(from[2 * i], from[2 * i + 1], T());
}

}  // namespace fused_norm::hopper
