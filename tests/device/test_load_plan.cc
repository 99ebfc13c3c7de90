// The load-and-plan kernel on the emulated device: from ids to the plan of the host, bit for bit,
// on every rank, in one launch.
#include <cstdio>

#include "cuda/device/load_plan.cuh"
#include "device/emulated_load.hpp"
#include "device/host_plan.hpp"
#include "support/watchdog.hpp"

namespace {

using namespace device_tests;
using uec::Topology;
using uec::cuda::LoadPlanArgs;
using uec::cuda::PlanOutput;

uint64_t address(const void* at) { return reinterpret_cast<uint64_t>(at); }

// A group's ranks, each with memory for its plan.
class EmulatedPlanner {
 public:
  explicit EmulatedPlanner(EmulatedGroup& ranks)
      : topology_(ranks.group().topology()),
        loads_(ranks),
        local_begin_(topology_.num_ranks + 1),
        local_experts_(topology_.num_experts) {
    uec::cuda::PlanArgs& plan = args_.plan;
    plan.home = address(topology_.home);
    plan.domain = address(topology_.domain);
    plan.local_begin = address(local_begin_.data());
    plan.local_experts = address(local_experts_.data());
    plan.num_ranks = topology_.num_ranks;
    plan.num_experts = topology_.num_experts;
    plan.slots_per_rank = topology_.slots_per_rank;
    plan.max_local_experts =
        uec::group_local_experts(topology_, local_begin_.data(), local_experts_.data());
    plan.allow_cross_domain = topology_.allow_cross_domain;
    for (int32_t r = 0; r < topology_.num_ranks; ++r) outputs_.emplace_back(part(0).bytes / 4 + 1);
  }

  EmulatedLoad& loads() { return loads_; }
  const Topology& topology() const { return topology_; }

  void launch(const LoadShape& shape, int32_t first, int32_t count) {
    LoadPlanArgs args = args_;
    args.load = loads_.args(first, count);
    for (int32_t i = 0; i < count; ++i) {
      std::vector<int32_t>& out = outputs_[first + i];
      std::fill(out.begin(), out.end(), EmulatedLoad::kUntouched);
      args.plans[i] = address(out.data());
      args.faults[i] = address(&faults_[first + i]);
    }
    emulation::launch(
        "ultraep_load_plan", args,
        {.blocks = shape.num_blocks,
         .ranks = count,
         .shared_bytes = uec::cuda::load_plan_shared_bytes(topology_, shape.num_warps),
         .warps = shape.num_warps,
         .first_rank = first},
        [&](std::byte* memory) { uec::cuda::load_plan(args, memory); });
  }
  void launch_apart(const LoadShape& shape) {
    Fibers ranks;
    for (int32_t r = 0; r < topology_.num_ranks; ++r)
      ranks.spawn([this, shape, r] { launch(shape, r, 1); });
    ranks.wait();
  }

  void check_plan(int32_t rank, const Plan& plan) {
    std::vector<int32_t>& out = outputs_[rank];
    const PlanOutput parts = part(address(out.data()));
    const auto check = [](uint64_t at, const std::vector<int32_t>& expected) {
      CHECK(std::equal(expected.begin(), expected.end(), reinterpret_cast<const int32_t*>(at)));
    };
    check(parts.slot_expert, plan.slot_expert);
    check(parts.slot_quota, plan.slot_quota);
    check(parts.home_quota, plan.home_quota);
    CHECK_EQ(faults_[rank], uint64_t{0});
    CHECK_EQ(out.back(), EmulatedLoad::kUntouched);
  }

 private:
  PlanOutput part(uint64_t base) const {
    return PlanOutput::cut(base, topology_.num_ranks, topology_.slots_per_rank,
                           topology_.num_experts);
  }

  Topology topology_;
  EmulatedLoad loads_;
  std::vector<int32_t> local_begin_, local_experts_;
  LoadPlanArgs args_;
  std::vector<std::vector<int32_t>> outputs_;
  std::vector<uint64_t> faults_ = std::vector<uint64_t>(8);  // [ranks]
};

// Returns how many plans were not empty, so that a test of nothing is noticed.
int check_random(uint32_t seed) {
  Random random(seed);
  const int32_t num_ranks = draw(random, 1, 4);
  PlanCase group = make_group(num_ranks, draw(random, 1, 12), draw(random, 0, 2));
  for (int32_t r = 0; r < num_ranks; ++r) group.domain[r] = r % draw(random, 1, 2);
  Options options;
  options.segment_bytes = {64};
  EmulatedGroup ranks(group, options);
  EmulatedPlanner planner(ranks);
  int plans = 0;
  for (int call = 0; call < 4; ++call) {
    planner.loads().draw(random);
    const LoadShape shape{draw(random, 1, 3), draw(random, 1, 4)};
    if (draw(random, 0, 1) == 0)
      planner.launch_apart(shape);
    else
      planner.launch(shape, 0, num_ranks);
    planner.loads().check_success();
    const Plan plan = plan_on_host(
        planner.topology(), sums(planner.loads().expected(), group.num_experts), uec::Objective{});
    for (int32_t r = 0; r < num_ranks; ++r) planner.check_plan(r, plan);
    plans += std::count(plan.slot_expert.begin(), plan.slot_expert.end(), -1) !=
             static_cast<int64_t>(plan.slot_expert.size());
  }
  return plans;
}

// A rank whose call failed has a plan that is safe to use.
void check_failure() {
  Options options;
  options.segment_bytes = {64};
  options.call_timeout = options.wait_timeout = 5;
  EmulatedGroup ranks(make_group(3, 5, 2), options);
  EmulatedPlanner planner(ranks);
  Random random(3);
  planner.loads().draw(random);
  planner.loads().give(1, {0, 1, 9}, 8, 0);
  planner.launch({2, 2}, 0, 3);
  Plan none(planner.topology());
  none.slot_expert.assign(none.slot_expert.size(), -1);
  none.slot_quota.assign(none.slot_quota.size(), 0);
  none.home_quota.assign(none.home_quota.size(), 0);
  for (int32_t r = 0; r < 3; ++r) {
    CHECK(ranks.report(r).fault == Fault::kRejected);
    CHECK_EQ(ranks.report(r).root, 1);
    planner.check_plan(r, none);
    planner.loads().check_left_ready(r);
  }
}

}  // namespace

int main() {
  const Watchdog watchdog("a launch that does not end");
  check_failure();
  const int groups = scaled(120);
  int plans = 0;
  for (int seed = 0; seed < groups; ++seed) plans += check_random(static_cast<uint32_t>(seed));
  std::printf("%d plans that are not empty\n", plans);
  CHECK(plans > groups / 2);
}
