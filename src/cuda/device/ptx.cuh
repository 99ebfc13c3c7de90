// Every instruction that C++ cannot express, one function each, and what it guarantees.
//
// The kernels use these and nothing else of the device, so that the tests can run the same kernels
// over an emulation of this file.
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "bulk copies need compute capability 9.0"
#endif

#define UEC_DEVICE __device__ __forceinline__
#define UEC_ROLE __device__ __forceinline__
#define UEC_DEVICE_NOINLINE \
  inline __device__ __noinline__  // shall take no registers from what moves bytes

namespace uec::ptx {

inline constexpr int32_t kWarpSize = 32;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFF;

// ---- where a thread is --------------------------------------------------------------------------

UEC_DEVICE int32_t thread_idx() { return static_cast<int32_t>(threadIdx.x); }
UEC_DEVICE int32_t num_threads() { return static_cast<int32_t>(blockDim.x); }  // of a block
UEC_DEVICE int32_t block_x() { return static_cast<int32_t>(blockIdx.x); }
UEC_DEVICE int32_t block_y() { return static_cast<int32_t>(blockIdx.y); }
UEC_DEVICE int32_t num_blocks_x() { return static_cast<int32_t>(gridDim.x); }

// ---- threads of a warp and of a block -----------------------------------------------------------

// Memory accesses of the warp's (block's) threads before it come before those after it.
UEC_DEVICE void sync_warp() { __syncwarp(); }
UEC_DEVICE void sync_block() { __syncthreads(); }
// These exchange values, and do not order memory.
UEC_DEVICE uint32_t shuffle(uint32_t value, int32_t lane) {
  return __shfl_sync(kAllLanes, value, lane);
}
UEC_DEVICE uint32_t reduce_min(uint32_t value) { return __reduce_min_sync(kAllLanes, value); }
UEC_DEVICE uint32_t reduce_add(uint32_t value) { return __reduce_add_sync(kAllLanes, value); }

// ---- flags: system scope, for memory that peers and the host see --------------------------------

// What its writer did before the release comes before what this thread does next.
UEC_DEVICE uint64_t load_acquire_system(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
// All that this thread did, or that comes before something it did, comes before the value.
UEC_DEVICE void store_release_system(uint64_t* at, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// Releases for all that this thread stores relaxed from here on.
UEC_DEVICE void fence_release_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
UEC_DEVICE void store_relaxed_system(uint64_t* at, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// All that this thread has stored has arrived when this returns. Of two such fences of different
// threads one is first: what comes after the other sees all that came before the first.
UEC_DEVICE void fence_system() { asm volatile("fence.sc.sys;" ::: "memory"); }

// ---- counters: device scope, for memory that only this device's blocks see ----------------------

UEC_DEVICE int32_t load_relaxed(const int32_t* at) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
UEC_DEVICE int32_t compare_swap_relaxed(int32_t* at, int32_t expected, int32_t value) {
  int32_t old;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(at), "r"(expected), "r"(value)
               : "memory");
  return old;
}
UEC_DEVICE int32_t fetch_add_relaxed(int32_t* at, int32_t value) {
  int32_t old;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(at), "r"(value)
               : "memory");
  return old;
}
// Returns the old value. What all earlier arrivals did comes before what this thread does next.
UEC_DEVICE int32_t fetch_add_acq_rel(int32_t* at, int32_t value) {
  int32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(at), "r"(value)
               : "memory");
  return old;
}
// What its writer did before the release comes before what this thread does next.
UEC_DEVICE uint64_t load_acquire_device(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
// All that this thread did, or that comes before something it did, comes before the value.
UEC_DEVICE void store_release_device(uint64_t* at, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// Returns what was there.
UEC_DEVICE uint64_t fetch_max_relaxed(uint64_t* at, uint64_t value) {
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.max.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(at), "l"(value)
               : "memory");
  return old;
}
UEC_DEVICE void max_relaxed(uint64_t* at, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
UEC_DEVICE void add_relaxed(uint64_t* at, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
UEC_DEVICE void add_relaxed(int32_t* at, int32_t value) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// A counter in shared memory, of the block's threads.
UEC_DEVICE void add_shared_relaxed(int32_t* at, int32_t value) {
  asm volatile("red.relaxed.cta.shared::cta.add.s32 [%0], %1;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(at))),
               "r"(value)
               : "memory");
}
// A word in shared memory, between the block's warps.
UEC_DEVICE int32_t load_shared_relaxed(const int32_t* at) {
  return *const_cast<const volatile int32_t*>(at);
}
UEC_DEVICE void store_shared_relaxed(int32_t* at, int32_t value) {
  *const_cast<volatile int32_t*>(at) = value;
}

// Memory of either kind that threads of one block change concurrently. They return the old value.
UEC_DEVICE int32_t fetch_add_in_block(int32_t* at, int32_t value) {
  int32_t old;
  asm volatile("atom.relaxed.cta.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(at), "r"(value)
               : "memory");
  return old;
}
UEC_DEVICE int64_t fetch_add_in_block(int64_t* at, int64_t value) {
  int64_t old;
  asm volatile("atom.relaxed.cta.add.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(at), "l"(value)
               : "memory");
  return old;
}
UEC_DEVICE void lower_in_block(uint32_t* at, uint32_t value) {
  asm volatile("red.relaxed.cta.min.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
UEC_DEVICE void set_in_block(uint8_t* at) {
  asm volatile("st.relaxed.cta.u8 [%0], %1;" ::"l"(at), "r"(1) : "memory");
}

// Bit i: lane i's value.
UEC_DEVICE uint32_t ballot(bool value) { return __ballot_sync(~0u, value); }
// The lanes that have this lane's value.
UEC_DEVICE uint32_t match(uint32_t value) { return __match_any_sync(kAllLanes, value); }
UEC_DEVICE int32_t num_set(uint32_t bits) { return __popc(bits); }
UEC_DEVICE int32_t lowest_set(uint32_t bits) { return __ffs(static_cast<int32_t>(bits)) - 1; }

// ---- bytes --------------------------------------------------------------------------------------

// Coherent: never from a cache that peers' stores do not reach, and not reordered with stores.
UEC_DEVICE uint4 load_global(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
UEC_DEVICE uint64_t load_global(const uint64_t* at) {
  uint64_t v;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}
UEC_DEVICE uint32_t load_global(const uint32_t* at) {
  uint32_t v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
UEC_DEVICE uint16_t load_global(const uint16_t* at) {
  uint16_t v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
  return v;
}
UEC_DEVICE uint8_t load_global(const uint8_t* at) {
  uint32_t v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return static_cast<uint8_t>(v);
}

// ---- numbers ------------------------------------------------------------------------------------

// Rounds to nearest, keeps subnormals; never fused with a product.
UEC_DEVICE float add(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}

// ---- mbarriers in shared memory -----------------------------------------------------------------

UEC_DEVICE uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}
UEC_DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
// Makes the initialised barriers known to the async proxy. A block-wide barrier follows.
UEC_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Releases what this thread did before to any thread that sees the phase complete.
UEC_DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(
                   shared_address(barrier))
               : "memory");
}
// Does what mbarrier_arrive() does, and the phase does not complete before `bytes` more have been
// loaded.
UEC_DEVICE void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "{\n .reg .b64 state;\n mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(
          shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Whether the phase of this parity is complete; if so, acquires what the arrivals released.
UEC_DEVICE bool mbarrier_test(const uint64_t* barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(complete)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return complete != 0;
}

// ---- bulk copies: the async proxy ---------------------------------------------------------------

// Between an ordinary access and a bulk copy of the same global memory, in either order.
UEC_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// Does the same for shared memory.
UEC_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Addresses and size are multiples of 16. The barrier's phase counts the bytes as they arrive. L2
// gives up first what is read `once`: without a branch, which would cost more.
UEC_DEVICE void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                          bool once) {
  asm volatile(
      "{\n"
      ".reg .pred once;\n"
      ".reg .b64 first, normal, policy;\n"
      "setp.ne.u32 once, %4, 0;\n"
      "createpolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
      "createpolicy.fractional.L2::evict_normal.b64 normal, 1.0;\n"
      "selp.b64 policy, first, normal, once;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], policy;\n"
      "}" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "r"(static_cast<uint32_t>(once))
      : "memory");
}
UEC_DEVICE void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}
// Closes this thread's group of bulk stores.
UEC_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All but this thread's latest kPending groups have read shared memory. They may not have arrived.
template <int kPending>
UEC_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// All but this thread's latest kPending groups have arrived, as this thread sees it: a
// fence_proxy_async_global() and a release make others see it.
template <int kPending>
UEC_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- time ---------------------------------------------------------------------------------------

UEC_DEVICE uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
UEC_DEVICE void pause() { asm volatile("nanosleep.u32 64;"); }

}  // namespace uec::ptx
