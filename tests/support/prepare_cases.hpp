// Calls for a team of any kind to prepare: any group, any plan, and plans that have a fault.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/plan/check.hpp"
#include "core/transfer/prepare.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/prepared_call.hpp"

struct PrepareCase {
  PlanCase plan;
  std::vector<int32_t> slot_quota, home_quota, segments, local_idx;
  std::vector<int64_t> segment_bytes;
  uec::CostModel cost;
  int32_t rank, mode, region;

  PrepareCase(PlanCase drawn, Random& random)
      : plan(std::move(drawn)),
        local_idx(plan.local_idx()),
        rank(draw(random, 0, plan.num_ranks - 1)) {
    const std::vector<std::vector<int64_t>> payloads{
        {100}, {3 << 20, 1}, {5, 200'000, (64 << 10) + 1}};
    segment_bytes = payloads[draw(random, 0, 2)];
    // A slow store, hop or group makes one mode or the other cheaper.
    cost = {draw(random, 1, 200'000), 50'000, draw(random, 0, 2'000'000),
            draw(random, 0, 2'000'000), 800};
    for (size_t i = 0; i < segment_bytes.size(); ++i)
      if (i == 0 || draw(random, 0, 3) > 0) segments.push_back(static_cast<int32_t>(i));
    mode = draw(random, -1, 2);
    region = draw(random, mode == static_cast<int32_t>(uec::Mode::kPull) ? 0 : -1, 0);
    for (size_t i = 0; i < plan.slot_expert.size(); ++i)
      slot_quota.push_back(draw(random, 0, 1000));
    for (int32_t e = 0; e < plan.num_experts; ++e) home_quota.push_back(draw(random, 0, 1000));
    if (draw(random, 0, 1) == 1) draw_residents(plan, random);
  }

  uec::Bank bank() const {
    if (plan.resident.empty()) return {};
    return {.index = 2, .version = 5, .resident = plan.residents()};
  }

  uec::GroupTables tables() const {
    return {plan.topology(), rank, segment_bytes.data(), local_idx.data(), 32 << 10, cost, {}};
  }
  uec::Capacity capacity() const {
    return {plan.num_ranks,
            plan.num_experts,
            plan.slots_per_rank,
            plan.num_local_experts()[rank],
            static_cast<int32_t>(segment_bytes.size()),
            0,
            1,
            plan.num_domains()};
  }

  // Puts any expert, or an out-of-range id, into any slots.
  void spoil(Random& random) {
    if (plan.slot_expert.empty()) return;
    const auto last = static_cast<int32_t>(plan.slot_expert.size()) - 1;
    for (int32_t i = draw(random, 1, 3); i > 0; --i)
      plan.slot_expert[draw(random, 0, last)] = draw(random, -2, plan.num_experts);
    const int32_t from = draw(random, 0, last);
    if (from % plan.slots_per_rank > 0) plan.slot_expert[from] = plan.slot_expert[from - 1];
  }
};

struct PrepareAnswer {
  uec::PlanCheck check;
  uint64_t quotas = 0, digest = 0;
  uint64_t schedule = 0, worklist = 0;  // what a member sees of them as soon as it can

  friend bool operator==(const PrepareAnswer& a, const PrepareAnswer& b) {
    return a.check.fault == b.check.fault && a.check.rank == b.check.rank &&
           a.check.slot == b.check.slot && a.check.expert == b.check.expert &&
           a.quotas == b.quotas && a.digest == b.digest && a.schedule == b.schedule &&
           a.worklist == b.worklist;
  }
};

inline uint64_t sight_of(const uec::Schedule& s, const uec::PlanShape& shape, int32_t num_ranks) {
  const int32_t num_replicas = s.first[s.num_experts];
  uint64_t sight = uec::mix(static_cast<uint64_t>(s.mode), shape.num_replicas);
  for (int32_t i = 0; i < num_replicas + 2 * s.num_experts; ++i)
    sight = uec::mix(sight, s.boundary[i]);
  for (int32_t i = 0; i < num_replicas; ++i) sight = uec::mix(sight, s.replica_rank[i]);
  for (int32_t r = 0; r < num_ranks; ++r) sight = uec::mix(sight, s.egress[r]);
  for (int32_t x = 0; x < s.num_experts; ++x)
    sight = uec::mix(uec::mix(sight, s.source[x].rank), s.source[x].slot);
  return sight;
}

inline uint64_t sight_of(const uec::Worklist& w, int32_t num_ranks) {
  uint64_t sight = uec::mix(w.num_tasks, w.num_expected);
  for (int32_t i = 0; i < w.num_pieces; ++i) sight = uec::mix(sight, w.pieces[i].end);
  for (int32_t i = 0; i < w.num_destinations; ++i) sight = uec::mix(sight, w.destinations[i].rank);
  for (int32_t r = 0; r < num_ranks; ++r) sight = uec::mix(sight, w.needs[r]);
  return sight;
}

// What the device does with a plan, from the first look at it. Every member calls this.
template <class Team>
PrepareAnswer prepare_call(Team team, const PrepareCase& c, Given& given) {
  const uec::GroupTables tables = c.tables();
  PrepareAnswer answer;
  answer.check = uec::check_plan(team, tables.topology, c.plan.slot_expert.data());
  answer.quotas = uec::digest_quotas(team, tables.topology, c.slot_quota.data(),
                                     c.home_quota.empty() ? nullptr : c.home_quota.data());
  if (answer.check.fault != uec::PlanFault::kNone) return answer;
  const uec::ReplicateArgs args{.slot_expert = c.plan.slot_expert.data(),
                                .plan_digest = answer.quotas,
                                .main_ptrs = nullptr,
                                .segments = c.segments.data(),
                                .num_segments = static_cast<int32_t>(c.segments.size()),
                                .mode = c.mode,
                                .region = c.region,
                                .bank = c.bank()};
  answer.digest =
      uec::fill_call(team, tables, args, given.arrays, given.schedule, &given.shape, &given.call);
  // The two parts again: what they have written may be read once they return.
  uec::Schedule& s = given.schedule.schedule;
  team.sync();
  uec::make_schedule(team, tables.topology, given.call.tiles, args.slot_expert, args.bank.resident,
                     args.mode, args.region >= 0, tables.cost, given.schedule.scratch, &given.shape,
                     s);
  answer.schedule = sight_of(s, given.shape, c.plan.num_ranks);
  team.sync();
  uec::build_worklist(team, tables.topology, s, tables.local_idx, tables.rank, given.call.work);
  answer.worklist = sight_of(given.call.work, c.plan.num_ranks);
  return answer;
}

inline void check_equal(const PrepareCase& c, const Given& a, const Given& b) {
  CHECK_EQ(a.shape.num_replicas, b.shape.num_replicas);
  CHECK_EQ(a.shape.max_exports, b.shape.max_exports);
  CHECK_EQ(a.shape.max_imports, b.shape.max_imports);
  CHECK_EQ(a.shape.max_fanout, b.shape.max_fanout);
  CHECK_EQ(a.shape.chained, b.shape.chained);
  CHECK_EQ(a.shape.relays, b.shape.relays);
  const uec::TileMap &left = a.call.tiles, &right = b.call.tiles;
  CHECK_EQ(left.num_segments, right.num_segments);
  CHECK_EQ(left.tile_bytes, right.tile_bytes);
  check_equal(left.segment, right.segment, left.num_segments);
  check_equal(left.bytes, right.bytes, left.num_segments);
  check_equal(left.first_tile, right.first_tile, left.num_segments + 1);
  check_equal(a.schedule.schedule, b.schedule.schedule, c.plan.num_ranks);
  check_equal(a.call.work, b.call.work, c.plan.num_ranks);
}

// What a test has covered, to be sure that it has covered enough.
struct PrepareSeen {
  int faults[5] = {}, modes[uec::kNumModes] = {};
  int chosen = 0, chained = 0, wide = 0, empty = 0, held = 0, relays = 0;

  void add(const PrepareCase& c, const PrepareAnswer& answer, const Given& given) {
    ++faults[static_cast<int>(answer.check.fault)];
    if (answer.check.fault != uec::PlanFault::kNone) return;
    ++modes[static_cast<int>(given.schedule.schedule.mode)];
    chosen += c.mode < 0 && given.schedule.schedule.mode != uec::Mode::kDirect;
    chained += given.shape.chained;
    wide += given.shape.max_fanout >= 8;
    empty += given.shape.num_replicas == 0;
    relays += given.shape.relays;
    const uec::Schedule& s = given.schedule.schedule;
    for (int32_t x = 0; x < s.num_experts; ++x) held += s.source[x].slot != uec::kMainSlot;
  }
  void require() const {
    for (const int count : faults) CHECK(count > 0);
    for (const int count : modes) CHECK(count > 0);
    CHECK(chosen > 0 && chained > 0 && wide > 0 && empty > 0 && held > 0 && relays > 0);
  }
};

// Draws `num_cases` calls, and prepares each alone and by the teams of `run(compare)`: it hands
// compare() functions of (c, given) that return what every member of a team has answered.
template <class Run>
void check_prepared(int32_t num_cases, int32_t max_ranks, const Run& run) {
  PrepareSeen seen;
  for (int32_t seed = 0; seed < num_cases; ++seed) {
    Random random(static_cast<uint32_t>(seed));
    PrepareCase c(draw_case(random, seed % 8 == 0 ? max_ranks : 12), random);
    if (seed % 3 == 0) c.spoil(random);
    Given expected(c.capacity());
    const PrepareAnswer answer = prepare_call(uec::SingleThread{}, c, expected);
    seen.add(c, answer, expected);
    run([&](const auto& prepare) {
      Given given(c.capacity());
      if (seed < num_cases / 2) {  // storage that another call has used
        PrepareCase other = c;
        other.mode = static_cast<int32_t>(uec::Mode::kPush);
        prepare_call(uec::SingleThread{}, other, given);
      }
      for (const PrepareAnswer& own : prepare(c, given)) CHECK(own == answer);
      if (answer.check.fault == uec::PlanFault::kNone) check_equal(c, given, expected);
    });
  }
  seen.require();
}
