// One submitted call with all the arrays it needs, allocated once when the engine is made.
#pragma once

#include <cstdint>
#include <vector>

#include "core/call.hpp"
#include "core/cost.hpp"
#include "core/schedule.hpp"

namespace uec::host {

enum class Operation : uint64_t { kReplicate = 1, kGather = 2 };

struct Capacity {
  int32_t num_ranks, num_experts, slots_per_rank, num_mains, num_segments, num_workers;
};

struct Prepared {
  explicit Prepared(const Capacity& c)
      : replicas(static_cast<size_t>(c.num_ranks) * c.slots_per_rank),
        expert(replicas + 1),
        first(replicas + 2),
        replica_rank(replicas + 1),
        replica_slot(replicas + 1),
        boundary(3 * replicas + 2),
        egress(c.num_ranks),
        count(c.num_experts + 1),
        exports(c.num_ranks),
        order(replicas + 1),
        extra(2 * replicas + 2),
        tasks(c.num_mains + c.slots_per_rank),
        pieces(c.num_mains + replicas + c.slots_per_rank),
        destinations(2 * replicas + 1),
        expected(2 * replicas + 1),
        opens(c.num_ranks),
        involved(c.num_ranks),
        cursor(pieces.size()),
        remaining(tasks.size()),
        live(pieces.size() * c.num_workers),
        gate(pieces.size() * c.num_workers),
        segment(c.num_segments),
        bytes(c.num_segments),
        first_tile(c.num_segments + 1),
        mains(static_cast<size_t>(c.num_segments) * c.num_mains),
        sent(c.num_ranks) {
    schedule = {Mode::kDirect,       0,
                expert.data(),       first.data(),
                replica_rank.data(), replica_slot.data(),
                boundary.data(),     egress.data()};
    scratch = {count.data(), exports.data(), order.data(), extra.data()};
    call.work = {0,
                 0,
                 0,
                 0,
                 tasks.data(),
                 pieces.data(),
                 destinations.data(),
                 expected.data(),
                 opens.data(),
                 involved.data()};
    call.cursor = cursor.data();
    call.remaining = remaining.data();
    call.tiles = {0, segment.data(), bytes.data(), first_tile.data(), 0};
    call.addresses.mains = mains.data();
  }

  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  Operation operation = Operation::kReplicate;
  Call call;
  Schedule schedule;
  ScheduleScratch scratch;
  PlanShape shape;
  const int32_t* row = nullptr;  // gather: [E] own counts, borrowed until the call has finished
  int32_t* table = nullptr;      // gather: [G][E] result

  size_t replicas;
  std::vector<int32_t> expert, first, replica_rank, replica_slot, boundary;
  std::vector<int64_t> egress;
  std::vector<int32_t> count, exports, order;
  std::vector<int64_t> extra;
  std::vector<Task> tasks;
  std::vector<Piece> pieces;
  std::vector<Destination> destinations;
  std::vector<Expected> expected;
  std::vector<uint8_t> opens, involved;
  std::vector<int32_t> cursor, remaining, live;
  std::vector<uint8_t> gate;
  std::vector<int32_t> segment;
  std::vector<int64_t> bytes, first_tile;
  std::vector<const uint8_t*> mains;
  std::vector<uint8_t> sent;
};

}  // namespace uec::host
