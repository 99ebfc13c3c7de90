// Gradient reductions for a team of any kind to prepare: any group, plan and gradients.
#pragma once

#include <cstdint>
#include <vector>

#include "core/transfer/prepare.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/prepared_call.hpp"

struct ReduceCase {
  PlanCase plan;                                 // of slots with tokens
  std::vector<int32_t> slot_expert, slot_quota;  // [G][S] of all slots; empty: the plan's
  std::vector<int32_t> local_idx;
  std::vector<int64_t> grad_bytes, grad_offset;
  std::vector<uec::GradType> grad_type, main_type;
  uec::CostModel cost{};
  int64_t tile_bytes = 32 << 10;
  int32_t mode = -1;
  bool zero = true;

  explicit ReduceCase(PlanCase of_plan) : plan(std::move(of_plan)), local_idx(plan.local_idx()) {}

  ReduceCase(PlanCase drawn, Random& random) : ReduceCase(std::move(drawn)) {
    const std::vector<std::vector<int64_t>> payloads{
        {100}, {3 << 20, 4}, {8, 200'000, (64 << 10) + 4}, {(32 << 10) + 4}, {20 << 20, 100}};
    for (const int64_t bytes : payloads[draw(random, 0, 4)])
      add_segment(bytes, static_cast<uec::GradType>(draw(random, 0, 1)),
                  static_cast<uec::GradType>(draw(random, 0, 1)));
    // A slow store, hop or group makes one mode or the other cheaper.
    cost = {draw(random, 1, 200'000), 50'000, draw(random, 0, 2'000'000),
            draw(random, 0, 2'000'000), 800};
    const int32_t modes[] = {-1, static_cast<int32_t>(uec::Mode::kPull),
                             static_cast<int32_t>(uec::Mode::kDirect)};
    mode = modes[draw(random, 0, 2)];
    zero = draw(random, 0, 1) == 1;
    if (draw(random, 0, 3) != 0) return;
    slot_expert = plan.slot_expert;
    for (int32_t& expert : plan.slot_expert) {
      slot_quota.push_back(draw(random, 0, 3) * 100);
      if (slot_quota.back() == 0) expert = -1;
    }
  }

  // `bytes` in a slot.
  void add_segment(int64_t bytes, uec::GradType in_slot, uec::GradType of_main) {
    grad_offset.push_back(grad_offset.empty() ? 0 : grad_offset.back() + (int64_t{1} << 30));
    grad_bytes.push_back(bytes);
    grad_type.push_back(in_slot);
    main_type.push_back(of_main);
  }

  int32_t num_segments() const { return static_cast<int32_t>(grad_bytes.size()); }
  uec::Capacity capacity(int32_t rank) const {
    return {.num_ranks = plan.num_ranks,
            .num_experts = plan.num_experts,
            .slots_per_rank = plan.slots_per_rank,
            .num_local_experts = plan.num_local_experts()[rank],
            .num_segments = 1,
            .num_grad_segments = num_segments()};
  }
  uec::GroupTables tables(int32_t rank) const {
    return {
        plan.topology(),
        rank,
        nullptr,
        local_idx.data(),
        tile_bytes,
        cost,
        {num_segments(), grad_bytes.data(), grad_type.data(), grad_offset.data()},
    };
  }
  uec::ReduceArgs args() const {
    const bool all = slot_quota.empty();
    return {.slot_expert = all ? plan.slot_expert.data() : slot_expert.data(),
            .slot_quota = all ? nullptr : slot_quota.data(),
            .plan_digest = 7,
            .main_ptrs = nullptr,
            .main_type = main_type.data(),
            .mode = mode,
            .zero = zero};
  }
  int64_t num_tiles() const {
    int64_t tiles = 0;
    for (const int64_t bytes : grad_bytes) tiles += uec::ceil_div(bytes, tile_bytes);
    return tiles;
  }
};

// Returns the digest. Every member of the team calls this.
template <class Team>
uint64_t prepare_reduction(Team team, const ReduceCase& c, int32_t rank, Given& given) {
  return uec::fill_call(team, c.tables(rank), c.args(), given.arrays, given.schedule, &given.shape,
                        &given.call);
}
