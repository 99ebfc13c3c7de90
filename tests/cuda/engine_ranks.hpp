// Engines of several ranks over a driver that only records its calls.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/device/block.hpp"
#include "cuda/engine.hpp"
#include "recorder.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace engine_tests {

using uec::EngineConfig;
using uec::EngineLayout;
using uec::Mode;
using uec::cuda::Address;
using uec::cuda::CallHeader;
using uec::cuda::Engine;
using uec::cuda::Handle;
using uec::cuda::Launcher;
using uec::cuda::LauncherConfig;
using uec::cuda::PeerConfig;
using uec::cuda::RankState;
using uec::cuda::Status;

inline const Handle kContext = reinterpret_cast<Handle>(0xC);
inline const Handle kUserStream = reinterpret_cast<Handle>(7);
inline constexpr int32_t kNumSms = 5, kBackgroundSms = 3;

inline std::string on(Handle stream) { return " on " + recorder::name_of(stream); }

inline EngineConfig make_config(const PlanCase& group, double call_timeout = 60) {
  EngineConfig c;
  c.num_experts = group.num_experts;
  c.slots_per_rank = group.slots_per_rank;
  c.home = group.home;
  c.domain = group.domain;
  c.segment_bytes = {100'000, 70};
  c.grad_bytes = {200'000, 140};
  c.grad_type = {uec::GradType::kFloat32, uec::GradType::kBFloat16};
  c.tile_bytes = 16 << 10;
  c.num_banks = 2;
  c.call_timeout = call_timeout;
  c.wait_timeout = 2.5;
  c.cost = {1000, 500, 2000, 2000, 100};
  c.bases.resize(group.num_ranks);  // see Ranks
  return c;
}

// Engines of `num_ranks` ranks from `first` on that share a launcher, and all their memory.
class Ranks {
 public:
  Ranks(const PlanCase& group, int32_t first, int32_t num_ranks, double call_timeout = 60)
      : config(make_config(group, call_timeout)) {
    recorder::state().complete = true;
    flags.resize(config.bases.size());
    for (size_t r = 0; r < flags.size(); ++r) {
      flags[r].resize(EngineLayout(config).symmetric.slots_base / 8);
      config.bases[r] = reinterpret_cast<uint8_t*>(flags[r].data());
    }
    LauncherConfig c{recorder::make_driver(),
                     kContext,
                     recorder::kOwnStream,
                     recorder::kCapturedStream,
                     recorder::kKernel,
                     recorder::kReduce,
                     recorder::kNotice,
                     recorder::kLoad,
                     recorder::kLoadPlan,
                     2,
                     32,
                     first,
                     num_ranks,
                     kNumSms,
                     kBackgroundSms,
                     config.tile_bytes,
                     227 << 10,
                     capacity(),
                     0,
                     nullptr,
                     call_timeout};
    device.resize(Launcher::device_bytes(c) / 8);
    pinned.resize(Launcher::pinned_bytes(c) / 8);
    c.device = reinterpret_cast<Address>(device.data());
    c.pinned = reinterpret_cast<uint8_t*>(pinned.data());
    launcher = std::make_shared<Launcher>(c);
    for (int32_t r = first; r < first + num_ranks; ++r) {
      config.rank = r;
      engines.push_back(std::make_unique<Engine>(config, PeerConfig{}, launcher));
    }
    main_ptrs.resize(2 * group.num_experts);
    for (size_t i = 0; i < main_ptrs.size(); ++i) main_ptrs[i] = 0x77000 + 16 * i;
    recorder::state().launches.clear();
    recorder::take_log();
  }
  ~Ranks() {
    recorder::state().complete = true;
    recorder::state().on_launch = nullptr;
    recorder::complete_all();
  }

  uec::Capacity capacity() const {
    const EngineLayout layout(config);
    uec::Capacity capacity = layout.capacity(config);
    capacity.num_local_experts = layout.max_local_experts;
    return capacity;
  }
  const RankState& state(int32_t rank) const {
    return *reinterpret_cast<const RankState*>(launcher->state(rank));
  }
  uec::ReplicateArgs args(const PlanCase& plan) const {
    uec::ReplicateArgs a;
    a.slot_expert = plan.slot_expert.data();
    a.plan_digest = 99;
    a.main_ptrs = main_ptrs.data();
    a.segments = segments_;
    a.num_segments = 2;
    a.mode = static_cast<int32_t>(Mode::kPush);
    return a;
  }
  uint64_t call(int32_t index, const PlanCase& plan, bool background, Handle stream = kUserStream) {
    Mode mode;
    return engines[index]->replicate(args(plan), background, stream, {}, &mode);
  }

  std::vector<std::vector<uint64_t>> flags;  // of each rank's symmetric memory: before the slots
  std::vector<uint64_t> device, pinned;      // outlive the engines
  EngineConfig config;
  std::shared_ptr<Launcher> launcher;
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<uint64_t> main_ptrs;

 private:
  static constexpr int32_t segments_[] = {0, 1};
};

inline PlanCase make_plan() {
  PlanCase group = make_group(3, 7, 2);  // rank 0 has three local experts
  CHECK(group.place(0, 1));
  CHECK(group.place(0, 2));
  CHECK(group.place(6, 0));
  return group;
}

}  // namespace engine_tests
