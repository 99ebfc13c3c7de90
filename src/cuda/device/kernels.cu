// The kernels of one cubin.
#include <cuda.h>
#include <nvshmem.h>

#include "cuda/device/load.cuh"
#include "cuda/device/load_plan.cuh"
#include "cuda/device/notice.cuh"
#include "cuda/device/plan.cuh"
#include "cuda/device/plan_bank.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/replicate.cuh"
#include "cuda/device/reroute.cuh"
#include "cuda/device/reroute_map.cuh"
#include "cuda/device/reroute_shares.cuh"
#include "cuda/device/save.cuh"

// Read in place, also at an index known only at run time.
#define UEC_ARGS(type) const __grid_constant__ uec::cuda::type
#define UEC_KERNEL(registers) extern "C" __global__ __maxnreg__(registers)

namespace {

extern __shared__ __align__(128) std::byte shared_memory[];

}  // namespace

UEC_KERNEL(80) void ultraep_replicate(UEC_ARGS(LaunchArgs) args) {
  uec::cuda::replicate<false>(args, shared_memory);
}

// Replicates with peers that only NVSHMEM's puts and signals reach. Its functions are called, not
// inlined, which costs registers.
UEC_KERNEL(104) void ultraep_replicate_far(UEC_ARGS(LaunchArgs) args) {
  uec::cuda::replicate<true>(args, shared_memory);
}

// Blocks of kReduceWarps warps.
UEC_KERNEL(64) void ultraep_reduce(UEC_ARGS(LaunchArgs) args) {
  uec::cuda::reduce(args, shared_memory);
}

// blockIdx.y: the rank of this launch. One warp.
UEC_KERNEL(64)
void ultraep_replicate_notice(const uint64_t states, const int64_t notice) {
  __shared__ uec::cuda::BlockCall block;
  auto& state = reinterpret_cast<uec::cuda::RankState*>(states)[blockIdx.y];
  const auto what = static_cast<uec::cuda::Notice>(notice);
  if (state.far == 0)
    uec::cuda::notify<false>(state, what, block);
  else
    uec::cuda::notify<true>(state, what, block);
}

// Turns ids into the table of loads.
UEC_KERNEL(64) void ultraep_load(const __grid_constant__ uec::cuda::LoadArgs args) {
  uec::cuda::load<false>(args, shared_memory);
}
UEC_KERNEL(104) void ultraep_load_far(const __grid_constant__ uec::cuda::LoadArgs args) {
  uec::cuda::load<true>(args, shared_memory);
}

// Turns ids into the table and its plan. Blocks of up to kMaxPlanWarps warps. With far peers it
// takes two launches: the planner leaves no registers for calls of NVSHMEM.
UEC_KERNEL(128)
void ultraep_load_plan(const __grid_constant__ uec::cuda::LoadPlanArgs args) {
  uec::cuda::load_plan(args, shared_memory);
}

// One block of up to kMaxPlanWarps warps.
UEC_KERNEL(128) void ultraep_plan(const uec::cuda::PlanArgs args) {
  uec::cuda::plan(args, shared_memory);
}

// One block of up to kMaxBankPlanWarps warps.
UEC_KERNEL(255) void ultraep_plan_in_bank(UEC_ARGS(BankPlanArgs) args) {
  uec::cuda::plan_in_bank(args, shared_memory);
}

// The reroute. First the shares, once per plan; then ids or maps.
UEC_KERNEL(64) void ultraep_reroute_shares(const uec::cuda::SharesArgs args) {
  uec::cuda::reroute_shares(args, shared_memory);
}
UEC_KERNEL(64) void ultraep_reroute_int32(const uec::cuda::RerouteArgs args) {
  uec::cuda::reroute_ids<int32_t>(args, shared_memory);
}
UEC_KERNEL(64) void ultraep_reroute_int64(const uec::cuda::RerouteArgs args) {
  uec::cuda::reroute_ids<int64_t>(args, shared_memory);
}
UEC_KERNEL(64) void ultraep_reroute_map(const uec::cuda::RerouteArgs args) {
  uec::cuda::reroute_map(args, shared_memory);
}

// One block.
UEC_KERNEL(64) void ultraep_save_plan(const __grid_constant__ uec::cuda::SaveArgs args) {
  uec::cuda::save_plan(args, shared_memory);
}

// What the loader reads before it gives a cubin to the driver: a mark, the versions that it was
// built with, its architecture, and the layout of the structs that the host fills.
namespace {

struct CubinInfo {
  int32_t mark = 0x55455032;
  int32_t version = uec::cuda::kVersion;
  int32_t cuda_major = __CUDACC_VER_MAJOR__;
  int32_t cuda_minor = __CUDACC_VER_MINOR__;
  int32_t nvshmem_major = NVSHMEM_VENDOR_MAJOR_VERSION;
  int32_t nvshmem_minor = NVSHMEM_VENDOR_MINOR_VERSION;
#if defined(__CUDA_ARCH__)
  int32_t arch = __CUDA_ARCH__ / 10;
#else
  int32_t arch = 0;
#endif
  uint32_t layout_hash = uec::cuda::kLayoutHash;
};

}  // namespace

extern "C" {
extern const __device__ CubinInfo ultraep_cubin_info;
const __device__ CubinInfo ultraep_cubin_info;
}
