// Arrays of a call as they are cut from one block, and a plan prepared in them: what schedule,
// worklist and digest compute in arrays of their own.
#include <cstring>
#include <vector>

#include "check.hpp"
#include "core/call_arrays.hpp"
#include "core/cost.hpp"
#include "core/digest.hpp"
#include "core/prepare.hpp"
#include "host/config.hpp"
#include "host/prepared.hpp"
#include "plans.hpp"
#include "worklists.hpp"

namespace {

using uec::Capacity;
using uec::Mode;
using uec::ReplicateArgs;

constexpr int64_t kGuard = 64;
constexpr std::byte kUntouched{0xA5};

// A block of exactly the size that a table asks for, between bytes that nobody may touch.
template <class Arrays>
class Block {
 public:
  Block(const Capacity& capacity, Arrays* arrays)
      : size_(Arrays::cut(nullptr, capacity, arrays)), bytes_(size_ + 2 * kGuard, kUntouched) {
    CHECK_EQ(size_ % 8, 0);  // so that another block may follow
    CHECK_EQ(Arrays::cut(bytes_.data() + kGuard, capacity, arrays), size_);
  }
  ~Block() {
    for (int64_t i = 0; i < kGuard; ++i) {
      CHECK(bytes_[i] == kUntouched);
      CHECK(bytes_[kGuard + size_ + i] == kUntouched);
    }
  }

  // Notes an array of `count` elements: inside the block, and apart from the others.
  template <class T>
  void add(const T* array, int64_t count) {
    const auto* const at = reinterpret_cast<const std::byte*>(array);
    CHECK_EQ(reinterpret_cast<uintptr_t>(at) % alignof(T), 0);
    CHECK(at >= bytes_.data() + kGuard);
    CHECK(at + count * sizeof(T) <= bytes_.data() + kGuard + size_);
    for (const auto& [begin, end] : arrays_)
      CHECK(at + count * sizeof(T) <= begin || end <= at || count == 0);
    arrays_.push_back({at, at + count * sizeof(T)});
  }

 private:
  int64_t size_;
  std::vector<std::byte> bytes_;
  std::vector<std::pair<const std::byte*, const std::byte*>> arrays_;
};

// What a rank has been given for a call.
struct Given {
  explicit Given(const Capacity& c) : call_block(c, &arrays), schedule_block(c, &schedule) {
    const int64_t replicas = c.replicas(), experts = uec::min64(c.num_experts, replicas);
    const int64_t tasks = c.num_mains + c.slots_per_rank;
    const uec::Worklist& w = arrays.work;
    call_block.add(w.tasks, tasks);
    call_block.add(w.pieces, c.pieces());
    call_block.add(w.destinations, replicas + c.slots_per_rank * c.num_ranks);
    call_block.add(w.expected, replicas + c.slots_per_rank * c.num_ranks);
    call_block.add(w.opens, c.num_ranks);
    call_block.add(w.involved, c.num_ranks);
    call_block.add(w.needs, c.num_ranks);
    call_block.add(arrays.cursor, c.pieces());
    call_block.add(arrays.remaining, tasks);
    call_block.add(arrays.segment, c.num_segments);
    call_block.add(arrays.bytes, c.num_segments);
    call_block.add(arrays.first_tile, c.num_segments + 1);
    call_block.add(arrays.mains, int64_t{c.num_segments} * c.num_mains);
    const uec::Schedule& s = schedule.schedule;
    schedule_block.add(s.expert, experts);
    schedule_block.add(s.first, experts + 1);
    schedule_block.add(s.replica_rank, replicas);
    schedule_block.add(s.replica_slot, replicas);
    schedule_block.add(s.boundary, replicas + 2 * experts);
    schedule_block.add(s.egress, c.num_ranks);
    schedule_block.add(schedule.scratch.count, c.num_experts + 1);
    schedule_block.add(schedule.scratch.exports, c.num_ranks);
    schedule_block.add(schedule.scratch.order, experts);
    schedule_block.add(schedule.scratch.extra, replicas + experts);
    arrays.lend_to(&call);
  }

  uec::CallArrays arrays;
  uec::ScheduleArrays schedule;
  Block<uec::CallArrays> call_block;
  Block<uec::ScheduleArrays> schedule_block;
  uec::PlanShape shape;
  uec::Call call;
};

template <class T>
void check_equal(const T* left, const T* right, int64_t count) {
  for (int64_t i = 0; i < count; ++i) CHECK_EQ(left[i], right[i]);
}

void check_equal(const uec::Schedule& a, const uec::Schedule& b, int32_t num_ranks) {
  CHECK(a.mode == b.mode);
  CHECK_EQ(a.num_experts, b.num_experts);
  const int32_t experts = a.num_experts, replicas = a.first[experts];
  check_equal(a.first, b.first, experts + 1);
  check_equal(a.expert, b.expert, experts);
  check_equal(a.replica_rank, b.replica_rank, replicas);
  check_equal(a.replica_slot, b.replica_slot, replicas);
  check_equal(a.boundary, b.boundary, replicas + 2 * experts);
  check_equal(a.egress, b.egress, num_ranks);
}

void check_equal(const uec::Worklist& a, const uec::Worklist& b, int32_t num_ranks) {
  CHECK_EQ(a.num_tasks, b.num_tasks);
  CHECK_EQ(a.num_pieces, b.num_pieces);
  CHECK_EQ(a.num_destinations, b.num_destinations);
  CHECK_EQ(a.num_expected, b.num_expected);
  for (int32_t i = 0; i < a.num_tasks; ++i) {
    CHECK_EQ(a.tasks[i].expert, b.tasks[i].expert);
    CHECK_EQ(a.tasks[i].num_groups, b.tasks[i].num_groups);
    CHECK_EQ(a.tasks[i].group_tiles, b.tasks[i].group_tiles);
    CHECK_EQ(a.tasks[i].done_first, b.tasks[i].done_first);
    CHECK_EQ(a.tasks[i].done_count, b.tasks[i].done_count);
    CHECK_EQ(a.tasks[i].pulled_home, b.tasks[i].pulled_home);
    CHECK_EQ(a.tasks[i].pulled_main, b.tasks[i].pulled_main);
  }
  for (int32_t i = 0; i < a.num_pieces; ++i) {
    CHECK_EQ(a.pieces[i].task, b.pieces[i].task);
    CHECK_EQ(a.pieces[i].begin, b.pieces[i].begin);
    CHECK_EQ(a.pieces[i].end, b.pieces[i].end);
    CHECK(a.pieces[i].source == b.pieces[i].source);
    CHECK_EQ(a.pieces[i].source_rank, b.pieces[i].source_rank);
    CHECK_EQ(a.pieces[i].source_idx, b.pieces[i].source_idx);
    CHECK_EQ(a.pieces[i].dst_first, b.pieces[i].dst_first);
    CHECK_EQ(a.pieces[i].dst_count, b.pieces[i].dst_count);
    CHECK_EQ(a.pieces[i].sets_ready, b.pieces[i].sets_ready);
  }
  for (int32_t i = 0; i < a.num_destinations; ++i) {
    CHECK_EQ(a.destinations[i].rank, b.destinations[i].rank);
    CHECK_EQ(a.destinations[i].slot, b.destinations[i].slot);
  }
  for (int32_t i = 0; i < a.num_expected; ++i) {
    CHECK(a.expected[i].kind == b.expected[i].kind);
    CHECK_EQ(a.expected[i].peer, b.expected[i].peer);
    CHECK_EQ(a.expected[i].expert, b.expected[i].expert);
    CHECK_EQ(a.expected[i].idx, b.expected[i].idx);
  }
  check_equal(a.opens, b.opens, num_ranks);
  check_equal(a.involved, b.involved, num_ranks);
  check_equal(a.needs, b.needs, num_ranks);
}

// Which of the group's segments a call transfers, and how.
struct Choice {
  std::vector<int32_t> segments;
  int32_t mode, region;
  uint64_t plan_digest;
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
                             .mains = nullptr,
                             .segments = choice.segments.data(),
                             .num_segments = static_cast<int32_t>(choice.segments.size()),
                             .mode = choice.mode,
                             .region = choice.region};
    std::vector<int64_t> bytes;
    for (const int32_t i : choice.segments) bytes.push_back(config_.segment_bytes[i]);
    const Tiles tiles(bytes, config_.tile_bytes);
    uint64_t digest = 0;
    for (config_.rank = 0; config_.rank < case_.num_ranks; ++config_.rank) {
      const uec::host::EngineLayout layout(config_);
      const Capacity capacity = layout.capacity(config_);
      const uec::GroupTables tables = layout.tables(config_);
      Given given(capacity);
      uint64_t own = 0;
      for (int repeat = 0; repeat < 2; ++repeat)
        own = prepare_replicate(tables, args, given.arrays, given.schedule, &given.shape,
                                &given.call);
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
      const WorklistArrays work(case_, tiles.map(), expected.schedule, config_.rank);
      check_equal(given.call.work, work.list, case_.num_ranks);
      // As full as they may ever be: nothing beyond an array is theirs.
      given.call.reset_counters(uec::Alone{});
      std::fill_n(given.arrays.cursor, capacity.pieces(), -1);
      std::fill_n(given.arrays.mains, capacity.num_segments * capacity.num_mains, nullptr);

      // An engine's storage holds the same.
      uec::host::Prepared prepared(capacity, 2);
      CHECK(prepare_replicate(tables, args, prepared.arrays, prepared.schedule, &prepared.shape,
                              &prepared.call) == digest);
      check_equal(prepared.schedule.schedule, expected.schedule, case_.num_ranks);
      check_equal(prepared.call.work, work.list, case_.num_ranks);
      prepared.call.reset_counters(uec::Alone{});
      for (int32_t worker = 0; worker < 2; ++worker) {
        std::memset(prepared.open(worker), 0xFF, case_.num_ranks);
        std::memset(prepared.state(worker), 0xFF, capacity.pieces());
      }
      check_equal(prepared.call.work, work.list, case_.num_ranks);
    }
    return digest;
  }

  PlanCase& plan() { return case_; }

 private:
  PlanCase case_;
  uec::host::EngineConfig config_;
};

void check_digests(Group& group, const Choice& choice, uint64_t digest) {
  Choice other = choice;
  other.plan_digest ^= 1;
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
