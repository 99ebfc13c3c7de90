// The reroute's kernels of one rank on the emulated device, with the memory that a host gives them.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "cuda/device/reroute.cuh"
#include "cuda/device/reroute_map.cuh"
#include "cuda/device/reroute_shares.cuh"
#include "support/check.hpp"
#include "support/routings.hpp"

namespace device_tests {

inline int32_t num_threads() {
  return ptx_machine::Client::instance() == nullptr ? emulation::kLanes * emulation::kWarps
                                                    : uec::cuda::kRerouteThreads;
}

using uec::cuda::RerouteGrid;

class EmulatedReroute {
 public:
  // The group and the source are those of `c`; its plan may change.
  EmulatedReroute(const RoutingCase& c, int64_t max_ids, int64_t max_tokens, int32_t window_log2)
      : case_(c) {
    shape_.rank = c.source;
    shape_.num_ranks = c.group.num_ranks;
    shape_.num_experts = c.group.num_experts;
    shape_.slots_per_rank = c.group.slots_per_rank;
    shape_.per_rank = c.per_rank;
    shape_.window_log2 = window_log2;
    shape_.max_runs = uec::max32(
        RerouteGrid::of_ids(shape_, max_ids, num_threads(), emulation::num_lanes()).num_blocks,
        RerouteGrid::of_map(shape_, max_tokens, num_threads(), emulation::num_lanes()).num_blocks);
    const int64_t bytes = uec::cuda::RerouteArrays::cut(nullptr, shape_, &arrays_);
    const auto size = static_cast<size_t>(uec::round_up(bytes, 16));
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(16, size)));
    std::memset(memory_.get(), 0, size);
    uec::cuda::RerouteArrays::cut(memory_.get(), shape_, &arrays_);
    std::copy(c.group.home.begin(), c.group.home.end(), arrays_.home);
    std::copy(c.main_id.begin(), c.main_id.end(), arrays_.main_id);
    std::copy(c.slot_id.begin(), c.slot_id.end(), arrays_.slot_id);
  }

  const uec::ShareTable& table() const { return arrays_.table; }
  // The status of the last launch, unless the box was left full before.
  uec::RerouteStatus status() const { return box.routing == 0 ? uec::RerouteStatus{} : box.status; }

  void share() {
    uec::cuda::SharesArgs args;
    args.shape = shape_;
    args.state = address(memory_.get());
    args.load = address(case_.load.data());
    args.slot_expert = address(case_.group.slot_expert.data());
    args.slot_quota = address(case_.slot_quota.data());
    args.home_quota = address(case_.home_quota.data());
    args.home = address(case_.plan().home);
    const int32_t threads = std::min(num_threads(), uec::cuda::kSharesThreads);
    launch("ultraep_reroute_shares", args,
           RerouteGrid::of_shares(shape_, threads, emulation::num_lanes()),
           [&](std::byte* shared) { uec::cuda::reroute_shares(args, shared); });
  }

  template <class Id>
  void reroute(const Id* ids, int64_t num_ids, Id* out) {
    uec::cuda::RerouteArgs args = make_args(ids, out, num_ids);
    launch_runs(sizeof(Id) == 4 ? "ultraep_reroute_int32" : "ultraep_reroute_int64", args,
                RerouteGrid::of_ids(shape_, num_ids, num_threads(), emulation::num_lanes()),
                [&](std::byte* shared) { uec::cuda::reroute_ids<Id>(args, shared); });
  }

  // probs and instances may be null.
  void reroute_map(const uint8_t* map, int64_t num_tokens, uint8_t* out, const uint8_t* probs,
                   uint8_t* physical_probs, int32_t prob_bytes, int32_t* instances = nullptr) {
    uec::cuda::RerouteArgs args = make_args(map, out, num_tokens);
    args.routing = uec::cuda::Routing::kMap;
    args.instances = address(instances);
    args.probs = address(probs);
    args.physical_probs = address(physical_probs);
    args.prob_bytes = prob_bytes;
    launch_runs("ultraep_reroute_map", args,
                RerouteGrid::of_map(shape_, num_tokens, num_threads(), emulation::num_lanes()),
                [&](std::byte* shared) { uec::cuda::reroute_map(args, shared); });
  }

  uec::cuda::RerouteFaultBox box;  // the host's to empty

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  static uint64_t address(const void* at) { return reinterpret_cast<uint64_t>(at); }

  uec::cuda::RerouteArgs make_args(const void* from, void* to, int64_t count) {
    uec::cuda::RerouteArgs args;
    args.shape = shape_;
    args.state = address(memory_.get());
    args.fault = address(&box);
    args.routing = uec::cuda::Routing::kIds;
    args.from = address(from);
    args.to = address(to);
    args.count = count;
    return args;
  }

  template <class Args>
  static void launch(const char* name, const Args& args, const RerouteGrid& grid,
                     const std::function<void(std::byte*)>& kernel) {
    emulation::launch(name, args,
                      {.blocks = grid.num_blocks,
                       .shared_bytes = grid.shared_bytes,
                       .warps = grid.num_threads / emulation::num_lanes()},
                      kernel);
  }
  void launch_runs(const char* name, const uec::cuda::RerouteArgs& args, const RerouteGrid& grid,
                   const std::function<void(std::byte*)>& kernel) {
    CHECK(grid.num_blocks <= shape_.max_runs);
    launch(name, args, grid, kernel);
  }

  const RoutingCase& case_;
  uec::cuda::RerouteShape shape_;
  uec::cuda::RerouteArrays arrays_;
  std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace device_tests
