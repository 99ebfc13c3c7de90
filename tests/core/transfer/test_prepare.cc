// Arrays of a call as they are cut from one block, and a plan prepared in them: what schedule,
// worklist and digest compute in arrays of their own.
#include <cstring>
#include <vector>

#include "core/base/digest.hpp"
#include "core/schedule/cost.hpp"
#include "core/transfer/call_arrays.hpp"
#include "core/transfer/prepare.hpp"
#include "engine/config.hpp"
#include "host/prepared.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/prepared_call.hpp"
#include "support/worklists.hpp"

namespace {

using uec::Capacity;
using uec::Mode;
using uec::ReplicateArgs;

// Which of the group's segments a call transfers, and how.
struct Choice {
  std::vector<int32_t> segments;
  int32_t mode, region;
  uint64_t plan_digest;
  uint64_t tag = 0;
};

class Group {
 public:
  Group(const PlanCase& c, std::vector<int64_t> segment_bytes) : case_(c) {
    config_.num_experts = c.num_experts;
    config_.slots_per_rank = c.slots_per_rank;
    config_.home = c.home;
    config_.domain = c.domain;
    config_.allow_cross_domain = c.allow_cross_domain;
    config_.segment_bytes = std::move(segment_bytes);
    config_.cost = {100'000, 50'000, 2'000'000, 2'000'000, 800};
  }

  int32_t num_segments() const { return static_cast<int32_t>(config_.segment_bytes.size()); }

  // Every rank prepares the call, twice in the same arrays. Returns its digest.
  uint64_t prepare(const Choice& choice) {
    const ReplicateArgs args{.slot_expert = case_.slot_expert.data(),
                             .plan_digest = choice.plan_digest,
                             .tag = choice.tag,
                             .main_ptrs = nullptr,
                             .segments = choice.segments.data(),
                             .num_segments = static_cast<int32_t>(choice.segments.size()),
                             .mode = choice.mode,
                             .region = choice.region};
    std::vector<int64_t> bytes;
    for (const int32_t i : choice.segments) bytes.push_back(config_.segment_bytes[i]);
    const Tiles tiles(bytes, config_.tile_bytes);
    uint64_t digest = 0;
    for (config_.rank = 0; config_.rank < case_.num_ranks; ++config_.rank) {
      const uec::EngineLayout layout(config_);
      const Capacity capacity = layout.capacity(config_);
      const uec::GroupTables tables = layout.tables(config_);
      Given given(capacity);
      uint64_t own = 0;
      for (int repeat = 0; repeat < 2; ++repeat)
        own = fill_call(uec::SingleThread{}, tables, args, given.arrays, given.schedule,
                        &given.shape, &given.call);
      if (config_.rank > 0) CHECK(own == digest);  // ranks agree
      digest = own;

      const uec::TileMap& map = given.call.tiles;
      CHECK_EQ(map.num_segments, choice.segments.size());
      CHECK_EQ(map.tile_bytes, config_.tile_bytes);
      check_equal(map.segment, choice.segments.data(), map.num_segments);
      check_equal(map.bytes, tiles.map().bytes, map.num_segments);
      check_equal(map.first_tile, tiles.map().first_tile, map.num_segments + 1);
      const uec::Schedule& schedule = given.schedule.schedule;
      CHECK(choice.mode < 0 || static_cast<int32_t>(schedule.mode) == choice.mode);
      CHECK(schedule.mode != Mode::kPull || choice.region >= 0);
      const ::ScheduleArrays expected(case_, tiles.map(), schedule.mode);
      check_equal(schedule, expected.schedule, case_.num_ranks);
      CHECK_EQ(given.shape.num_replicas, expected.shape.num_replicas);
      const WorklistArrays work(case_, expected.schedule, config_.rank);
      check_equal(given.call.work, work.list, case_.num_ranks);
      // At full capacity: nothing beyond an array is written.
      given.call.reset_counters(uec::SingleThread{});
      std::fill_n(given.arrays.arrived, capacity.tasks(), -1);
      std::fill_n(given.arrays.main_ptrs, capacity.num_segments * capacity.num_local_experts,
                  nullptr);

      // An engine's storage holds the same.
      uec::host::Prepared prepared(capacity, 2);
      CHECK(fill_call(uec::SingleThread{}, tables, args, prepared.arrays, prepared.schedule,
                      &prepared.shape, &prepared.call) == digest);
      check_equal(prepared.schedule.schedule, expected.schedule, case_.num_ranks);
      check_equal(prepared.call.work, work.list, case_.num_ranks);
      prepared.call.reset_counters(uec::SingleThread{});
      for (int32_t worker = 0; worker < 2; ++worker) {
        const uec::StripeScratch& scratch = prepared.scratch(worker);
        std::memset(scratch.open, 0xFF, case_.num_ranks);
        std::memset(scratch.groups(), 0xFF, capacity.pieces() * sizeof(uec::QueuedGroups));
      }
      check_equal(prepared.call.work, work.list, case_.num_ranks);
    }
    return digest;
  }

  PlanCase& plan() { return case_; }

 private:
  PlanCase case_;
  uec::EngineConfig config_;
};

void check_digests(Group& group, const Choice& choice, uint64_t digest) {
  Choice other = choice;
  other.plan_digest ^= 1;
  CHECK(group.prepare(other) != digest);
  other = choice;
  other.tag ^= 1;
  CHECK(group.prepare(other) != digest);
  other = choice;
  if (choice.segments.size() > 1) {
    other.segments.pop_back();
    CHECK(group.prepare(other) != digest);
  }
  other = choice;
  if (choice.mode == static_cast<int32_t>(Mode::kPull)) {
    ++other.region;
    CHECK(group.prepare(other) != digest);
  }
  other = choice;
  if (choice.mode >= 0) {
    other.mode = (choice.mode + 1) % uec::kNumModes;
    other.region = 0;
    CHECK(group.prepare(other) != digest);
  }
  for (int32_t& expert : group.plan().slot_expert) {
    if (expert < 0) continue;
    expert = -1;
    CHECK(group.prepare(choice) != digest);
    return;
  }
}

}  // namespace

int main() {
  Random random(9);
  const std::vector<std::vector<int64_t>> payloads{
      {100}, {3 << 20, 1}, {5, 200'000, (64 << 10) + 1}};
  for (int repeat = 0; repeat < scaled(300); ++repeat) {
    Group group(draw_case(random, repeat % 10 == 0 ? 36 : 8), payloads[repeat % 3]);
    Choice choice{{}, draw(random, -1, 2), 0, static_cast<uint64_t>(repeat)};
    for (int32_t i = 0; i < group.num_segments(); ++i)
      if (i + 1 == group.num_segments() || draw(random, 0, 3) > 0) choice.segments.push_back(i);
    if (choice.mode == static_cast<int32_t>(Mode::kPull)) choice.region = draw(random, 0, 2);
    if (choice.mode < 0 && draw(random, 0, 1) == 0) choice.region = -1;
    const uint64_t digest = group.prepare(choice);
    check_digests(group, choice, digest);
  }
}
