// The plan kernel on the emulated device: the plan of the host, bit for bit, with any number of
// warps, and what it says of a load that has none.
#include <cstdio>

#include "device/emulated_plan.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/watchdog.hpp"

namespace {

using namespace device_tests;
using uec::Objective;
using uec::Topology;
using uec::cuda::LoadFault;
using uec::cuda::PlanStatus;

// Counts what was covered, so that a test that covers nothing fails.
struct Seen {
  int plans, empty, in_bank, still;  // still: in a bank, without a move
};

void check_load(const Topology& topology, const std::vector<int32_t>& load,
                const Objective& objective, int32_t num_warps, Seen* seen) {
  uint64_t fault = 0;
  const Plan device =
      plan_on_device(topology, load, objective, num_warps, &fault, num_warps % 2 == 0);
  CHECK_EQ(fault, 0);
  const Plan host = plan_on_host(topology, sums(load, topology.num_experts), objective);
  CHECK(device.slot_expert == host.slot_expert);
  CHECK(device.slot_quota == host.slot_quota);
  CHECK(device.home_quota == host.home_quota);
  ++seen->plans;
  seen->empty += std::count(host.slot_quota.begin(), host.slot_quota.end(), 0) ==
                 static_cast<int64_t>(host.slot_quota.size());
}

// Tokens of an expert over all sources: even, of a long tail, of a few hot ones, tiny, or so large
// that sums of a rank pass 2^31.
std::vector<int32_t> draw_load(Random& random, const Topology& topology, int32_t num_sources) {
  const int32_t kind = draw(random, 0, 7);
  const int32_t num_experts = topology.num_experts;
  std::vector<int32_t> load(num_sources * num_experts);
  const int32_t hot = draw(random, 0, num_experts - 1), hot_rank = topology.home[hot];
  for (int32_t e = 0; e < num_experts; ++e) {
    const int32_t most[] = {
        2000,
        2000,
        100000 / (1 + (e + hot) % num_experts),
        100000 >> ((e * 7 + hot) % num_experts % 17),
        e == hot ? 1 << 20 : 20,
        topology.home[e] == hot_rank ? 1 << 16 : 3,
        3,
        static_cast<int32_t>(uec::kMaxLoad / num_sources),
    };
    for (int32_t s = 0; s < num_sources; ++s)
      load[s * num_experts + e] = kind == 1 ? 4096 : draw(random, 0, most[kind]);
  }
  return load;
}

void check_random(uint32_t seed, Seen* seen) {
  Random random(seed);
  PlanCase group = draw_case(random, draw(random, 0, 9) == 0 ? 40 : 10);
  const int32_t num_domains = draw(random, 1, 3);
  for (int32_t r = 0; r < group.num_ranks; ++r) group.domain[r] = r % num_domains - 1;
  if (group.slots_per_rank == 0 && seed % 4 != 0) group.slots_per_rank = 1;
  const Topology topology = group.topology();
  constexpr int64_t kTargets[] = {1'000'000, 1'010'000, 1'010'000, 1'100'000, 2'000'000};
  constexpr int32_t kWarps[] = {1, 2, 3, 4, 5, 8, 16};
  for (int i = 0; i < 4; ++i) {
    Objective objective{.target_ppm = kTargets[draw(random, 0, 4)]};
    if (draw(random, 0, 7) == 0)
      objective = {.by_cost = true,
                   .per_token = draw(random, 0, 1 << 10),
                   .per_transfer = draw(random, 0, 1 << 14),
                   .per_replica = draw(random, 0, 1 << 9)};
    const int32_t num_sources = draw(random, 0, 1) == 0 ? 1 : group.num_ranks;
    check_load(topology, draw_load(random, topology, num_sources), objective,
               kWarps[draw(random, 0, 6)], seen);
  }
}

// Plans of a bank, each on top of what the one before has left there.
void check_steps(uint32_t seed, PlanCase group, int32_t num_steps, Seen* seen) {
  Random random(seed);
  const Topology topology = group.topology();
  constexpr int64_t kTargets[] = {1'000'000, 1'010'000, 1'010'000, 1'200'000};
  const int64_t target_ppm = kTargets[draw(random, 0, 3)];
  std::vector<int32_t> held(topology.num_ranks * topology.slots_per_rank, -1);
  std::vector<int32_t> load = draw_load(random, topology, 1);
  for (int step = 0; step < num_steps; ++step) {
    for (int32_t& tokens : load)  // a little like the one before, or not at all
      tokens = static_cast<int32_t>(
          std::min(uec::kMaxLoad, int64_t{tokens} * draw(random, 60, 99) / 80));
    if (draw(random, 0, 3) == 0) load = draw_load(random, topology, 1);
    const bool is_known = draw(random, 0, 7) != 0;
    uec::BankTable bank{.version = 3, .segments = is_known ? 1u : 0u, .resident = held.data()};
    uint64_t fault = 0;
    std::vector<uint8_t> moves;
    const int32_t warps = draw(random, 1, uec::cuda::kMaxBankPlanWarps);
    const Plan device =
        plan_in_bank_on_device(topology, load, bank, target_ppm, warps, &fault, &moves);
    CHECK_EQ(fault, 0);
    if (!is_known) std::fill(held.begin(), held.end(), -1);
    const Plan host =
        plan_in_bank_on_host(topology, sums(load, topology.num_experts), held, target_ppm);
    CHECK(device.slot_expert == host.slot_expert);
    CHECK(device.slot_quota == host.slot_quota);
    CHECK(device.home_quota == host.home_quota);
    for (size_t i = 0; i < held.size(); ++i) CHECK_EQ(moves[i], host.slot_expert[i] != held[i]);
    const bool is_empty = std::count(held.begin(), held.end(), -1) == std::ssize(held);
    seen->in_bank += !is_empty;
    seen->still += !is_empty && host.slot_expert == held;
    held = host.slot_expert;
  }
}

// A size of section 10's kind, with as many warps as a device would have.
void check_size(int32_t num_ranks, int32_t num_experts, int32_t slots, int32_t domain_size,
                uint32_t seed, Seen* seen) {
  Random random(seed);
  PlanCase group = make_group(num_ranks, num_experts, slots);
  for (int32_t r = 0; r < num_ranks; ++r) group.domain[r] = r / domain_size;
  const Topology topology = group.topology();
  for (int i = 0; i < 2; ++i)
    check_load(topology, draw_load(random, topology, 1), Objective{},
               i == 0 ? uec::cuda::kMaxPlanWarps : 8, seen);
}

void check_fault(const Topology& topology, const std::vector<int32_t>& load, LoadFault fault,
                 int32_t expert) {
  for (const int32_t num_warps : {1, 3, 8}) {
    uint64_t word = 0;
    const Plan plan =
        plan_on_device(topology, load, Objective{}, num_warps, &word, num_warps % 2 == 0);
    CHECK(PlanStatus::of(word).fault == fault);
    CHECK_EQ(PlanStatus::of(word).expert, expert);
    word = 77;  // the first stays
    plan_on_device(topology, load, Objective{}, num_warps, &word, num_warps % 2 == 0);
    CHECK_EQ(word, 77);
    for (const int32_t e : plan.slot_expert) CHECK_EQ(e, -1);
    for (const int32_t q : plan.slot_quota) CHECK_EQ(q, 0);
    for (const int32_t q : plan.home_quota) CHECK_EQ(q, 0);
  }
}

void check_faults() {
  const PlanCase group = make_group(3, 600, 2);
  const Topology topology = group.topology();
  std::vector<int32_t> load(3 * 600, 5);
  load[600 + 17] = load[2 * 600 + 40] = -1;
  load[11] = load[1200 + 11] = 1 << 30;
  check_fault(topology, load, LoadFault::kTooMany, 11);
  load[11] -= 6;  // as many as there may be
  check_fault(topology, load, LoadFault::kNegative, 17);
  load.assign(600, INT32_MAX);
  check_fault(topology, load, LoadFault::kTooManyInAll, -1);

  std::vector<int32_t> held(3 * 2, -1);
  held[0] = 599;
  const uec::BankTable bank{.version = 1, .segments = 1, .resident = held.data()};
  uint64_t word = 0;
  std::vector<uint8_t> moves;
  const Plan plan = plan_in_bank_on_device(topology, load, bank, 1'010'000, 3, &word, &moves);
  CHECK(PlanStatus::of(word).fault == LoadFault::kTooManyInAll);
  for (const int32_t e : plan.slot_expert) CHECK_EQ(e, -1);
  for (const uint8_t move : moves) CHECK_EQ(move, 0);
}

}  // namespace

int main() {
  const Watchdog watchdog("a launch that does not end");
  check_faults();
  Seen seen{};
  // As many as the mutants need.
  constexpr bool kFewLanes = uec::ptx::kWarpSize <= 4;
  const int cases = kFewLanes ? (kPart == 1 ? 250 : 63) : scaled(20);
  for (int seed = 0; seed < cases; ++seed) check_random(static_cast<uint32_t>(seed), &seen);
  const int sizes = kFewLanes ? scaled(4) : 1;
  for (int seed = 0; seed < sizes; ++seed) {
    check_size(64, 256, 2, 64, static_cast<uint32_t>(seed), &seen);
    check_size(32, 128, 1, 8, static_cast<uint32_t>(seed), &seen);
  }
  const int chains = kFewLanes ? (kPart == 1 ? 120 : 30) : scaled(8);
  for (int seed = 0; seed < chains; ++seed) {
    Random random(static_cast<uint32_t>(seed));
    PlanCase group = draw_case(random, 12);
    for (int32_t r = 0; r < group.num_ranks; ++r) group.domain[r] = r % draw(random, 1, 3);
    check_steps(static_cast<uint32_t>(seed), group, 6, &seen);
  }
  for (int seed = 0; seed < sizes; ++seed) {
    check_steps(static_cast<uint32_t>(seed), make_group(8, 32, 2), 6, &seen);
    check_steps(static_cast<uint32_t>(seed), make_group(64, 256, 2), 3, &seen);
  }
  std::printf("%d plans, %d of them empty; %d in banks, %d of them without a move\n", seen.plans,
              seen.empty, seen.in_bank, seen.still);
  CHECK(seen.empty < seen.plans / 2);
  CHECK(seen.still > 0 && seen.still < seen.in_bank);
}
