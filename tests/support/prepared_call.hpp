// The arrays of one call between guard bytes, and which of their contents have to be equal.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/transfer/call_arrays.hpp"
#include "core/transfer/prepare.hpp"
#include "support/check.hpp"

inline constexpr int64_t kGuard = 64;
inline constexpr std::byte kUntouched{0xA5};

// A block of exactly the size that a table asks for, between guard bytes.
template <class Arrays>
class Block {
 public:
  Block(const uec::Capacity& capacity, Arrays* arrays)
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
    const auto* const at = check_inside(array, count);
    for (const auto& [begin, end] : arrays_)
      CHECK(at + count * sizeof(T) <= begin || end <= at || count == 0);
    arrays_.push_back({at, at + count * sizeof(T)});
  }

  // Notes one that may share its memory with those before it, but not with those that follow.
  template <class T>
  void add_again(const T* array, int64_t count) {
    const auto* const at = check_inside(array, count);
    arrays_.push_back({at, at + count * sizeof(T)});
  }

 private:
  template <class T>
  const std::byte* check_inside(const T* array, int64_t count) const {
    const auto* const at = reinterpret_cast<const std::byte*>(array);
    CHECK_EQ(reinterpret_cast<uintptr_t>(at) % alignof(T), 0);
    CHECK(at >= bytes_.data() + kGuard);
    CHECK(at + count * sizeof(T) <= bytes_.data() + kGuard + size_);
    return at;
  }

  int64_t size_;
  std::vector<std::byte> bytes_;
  std::vector<std::pair<const std::byte*, const std::byte*>> arrays_;
};

// What a rank has been given for a call.
struct Given {
  explicit Given(const uec::Capacity& c) : call_block(c, &arrays), schedule_block(c, &schedule) {
    const int64_t replicas = c.replicas(), experts = c.entries();
    const int64_t tasks = c.tasks();
    const uec::Worklist& w = arrays.work;
    call_block.add(w.tasks, tasks);
    call_block.add(w.pieces, c.pieces());
    call_block.add_again(w.reductions, c.reductions());
    call_block.add(w.destinations, 2 * replicas + 1);
    call_block.add(w.expected, 2 * replicas + 1);
    call_block.add(w.opens, c.num_ranks);
    call_block.add(w.involved, c.num_ranks);
    call_block.add(w.needs, c.num_ranks);
    const int64_t segments = c.tiled_segments();
    call_block.add(arrays.arrived, uec::max64(tasks, c.reductions()));
    call_block.add(arrays.segment, segments);
    call_block.add(arrays.bytes, segments);
    call_block.add(arrays.first_tile, segments + 1);
    call_block.add(arrays.main_ptrs, segments * c.num_local_experts);
    call_block.add(arrays.main_type, c.num_grad_segments);
    const uec::Schedule& s = schedule.schedule;
    schedule_block.add(s.expert, experts);
    schedule_block.add(s.first, experts + 1);
    schedule_block.add(s.replica_rank, replicas);
    schedule_block.add(s.replica_slot, replicas);
    schedule_block.add(s.boundary, replicas + 2 * experts);
    schedule_block.add(s.egress, c.num_ranks);
    schedule_block.add(schedule.scratch.count, uec::max64(c.num_experts, experts) + 1);
    schedule_block.add(schedule.scratch.exports, c.num_ranks);
    schedule_block.add(schedule.scratch.order, experts);
    schedule_block.add(schedule.scratch.extra, replicas + experts);
    arrays.bind_arrays(&call);
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

inline void check_equal(const uec::Schedule& a, const uec::Schedule& b, int32_t num_ranks) {
  CHECK(a.mode == b.mode);
  CHECK_EQ(a.num_experts, b.num_experts);
  const int32_t experts = a.num_experts, replicas = a.first[experts];
  check_equal(a.first, b.first, experts + 1);
  check_equal(a.expert, b.expert, experts);
  check_equal(a.replica_rank, b.replica_rank, replicas);
  check_equal(a.replica_slot, b.replica_slot, replicas);
  check_equal(a.boundary, b.boundary, replicas + 2 * experts);
  check_equal(a.egress, b.egress, num_ranks);
  for (int32_t x = 0; x < experts; ++x) {
    CHECK_EQ(a.source[x].rank, b.source[x].rank);
    CHECK_EQ(a.source[x].slot, b.source[x].slot);
  }
}

inline void check_equal(const uec::Worklist& a, const uec::Worklist& b, int32_t num_ranks) {
  CHECK_EQ(a.num_tasks, b.num_tasks);
  CHECK_EQ(a.num_pieces, b.num_pieces);
  CHECK_EQ(a.num_destinations, b.num_destinations);
  CHECK_EQ(a.num_expected, b.num_expected);
  for (int32_t i = 0; i < a.num_tasks; ++i) {
    CHECK_EQ(a.tasks[i].expert, b.tasks[i].expert);
    CHECK_EQ(a.tasks[i].num_groups, b.tasks[i].num_groups);
    CHECK_EQ(a.tasks[i].done_first, b.tasks[i].done_first);
    CHECK_EQ(a.tasks[i].done_count, b.tasks[i].done_count);
    CHECK_EQ(a.tasks[i].pulled_rank, b.tasks[i].pulled_rank);
    CHECK_EQ(a.tasks[i].pulled_idx, b.tasks[i].pulled_idx);
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
  CHECK_EQ(a.num_reductions, b.num_reductions);
  for (int32_t i = 0; i < a.num_reductions; ++i) {
    const uec::Reduction &left = a.reductions[i], &right = b.reductions[i];
    CHECK_EQ(left.kind, right.kind);
    CHECK_EQ(left.expert, right.expert);
    CHECK_EQ(left.begin, right.begin);
    CHECK_EQ(left.end, right.end);
    CHECK_EQ(left.tile, right.tile);
    CHECK_EQ(left.end_tile, right.end_tile);
    CHECK_EQ(left.group_tiles, right.group_tiles);
    CHECK_EQ(left.idx, right.idx);
    CHECK_EQ(left.home, right.home);
    CHECK_EQ(left.local_idx, right.local_idx);
    CHECK_EQ(left.of_hub, right.of_hub);
    CHECK_EQ(left.first, right.first);
    CHECK_EQ(left.count, right.count);
  }
  check_equal(a.opens, b.opens, num_ranks);
  check_equal(a.involved, b.involved, num_ranks);
  check_equal(a.needs, b.needs, num_ranks);
}
