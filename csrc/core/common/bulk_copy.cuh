// Bulk copies from global to shared memory, which one thread starts and the chip does on the side,
// and small ones to the shared memory of other blocks of a cluster. Only kernels of compute
// capability 9.0 on may call these functions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "core/common/pack.cuh"

namespace fused_norm {

// Says when copies into shared memory have arrived; lies there itself. It goes through phases, each
// begun by the threads that start the copies, mostly one.
class CopyBarrier {
 public:
  // By one of these `threads`, which then calls order_inits(). A barrier of the block follows
  // before the others wait.
  __device__ __forceinline__ void init(int threads = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(threads)
                 : "memory");
  }
  // Puts the barriers that the thread made before copies and other blocks' writes.
  __device__ __forceinline__ static void order_inits() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    order_writes();
  }

  // Begins a phase, which ends when all these threads' `bytes` have been copied. Those who waited
  // for its end also see what the thread wrote before.
  __device__ __forceinline__ void expect(int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }

  // Starts a copy of a multiple of 16 bytes, between multiples of 16.
  __device__ __forceinline__ void copy(char* to, const char* from, int bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(this))
        : "memory");
  }

  // Writes `value`, 4 or 8 bytes, to `to` in the shared memory of a block of the cluster; part of
  // what this barrier expects there. That block has begun, and will wait for it.
  template <typename V>
  __device__ __forceinline__ void send(const V& value, V* to, int rank) const {
    if constexpr (sizeof(V) == 8) {
      uint64_t bits;
      memcpy(&bits, &value, sizeof(bits));
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(
              of_block(to, rank)),
          "l"(bits), "r"(of_block(this, rank))
          : "memory");
    } else {
      static_assert(sizeof(V) == 4);
      uint32_t bits;
      memcpy(&bits, &value, sizeof(bits));
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
              of_block(to, rank)),
          "r"(bits), "r"(of_block(this, rank))
          : "memory");
    }
  }

  // Until the end of a phase. The first has parity 0, the next 1, and so on in turn; a new barrier
  // is as if one of parity 1 had ended. kFromCluster: other blocks of the cluster sent something.
  template <bool kFromCluster = false>
  __device__ __forceinline__ void wait(uint32_t parity) const {
#define FUSED_NORM_TRY_WAIT(semantics)         \
  asm volatile(                                \
      "{\n"                                    \
      ".reg .pred done;\n"                     \
      "mbarrier.try_wait.parity" semantics     \
      ".shared::cta.b64 done, [%1], %2;\n"     \
      "selp.u32 %0, 1, 0, done;\n"             \
      "}"                                      \
      : "=r"(done)                             \
      : "r"(shared_address(this)), "r"(parity) \
      : "memory")
    uint32_t done;
    do {
      if constexpr (kFromCluster) {
        FUSED_NORM_TRY_WAIT(".acquire.cluster");
      } else {
        FUSED_NORM_TRY_WAIT("");
      }
    } while (!done);
#undef FUSED_NORM_TRY_WAIT
  }

  // Puts what the thread wrote to shared memory before the copies that it starts from now on.
  __device__ __forceinline__ static void order_writes() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

 private:
  __device__ __forceinline__ static uint32_t of_block(const void* shared, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(there)
        : "r"(shared_address(shared)), "r"(rank));
    return there;
  }

  uint64_t word_;
};

// A place in a ring of slots in shared memory, each with a CopyBarrier: which slot, and the parity
// of the phase that its barrier is in.
struct RingSlot {
  int number = 0;
  uint32_t parity = 0;

  // To the next of `count` slots.
  __device__ __forceinline__ void next(int count) {
    if (++number == count) {
      number = 0;
      parity ^= 1;
    }
  }
};

// Copies bytes from `begin` to `end`, of elements T, that no bulk copy can.
template <typename T>
__device__ __forceinline__ void copy_rest(char* to, const char* from, int begin, int end) {
#pragma unroll 1
  for (int i = begin; i < end; i += sizeof(T))
    *reinterpret_cast<T*>(to + i) = *reinterpret_cast<const T*>(from + i);
}

// Starts a copy of a multiple of 16 bytes from shared memory, between multiples of 16. What it
// copies was written there before order_writes() and a barrier.
__device__ __forceinline__ void store_bulk(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
// Makes a group of the thread's own such copies since the last call.
__device__ __forceinline__ void commit_bulk_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until no more than the thread's last kGroups groups still read shared memory.
template <int kGroups>
__device__ __forceinline__ void wait_for_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

}  // namespace fused_norm
