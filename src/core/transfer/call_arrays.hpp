// The arrays of one call: one table gives their size and their addresses, on host and device.
#pragma once

#include <cstddef>

#include "core/base/scratch.hpp"
#include "core/transfer/call.hpp"

namespace uec {

// The most that a group, and one rank of it, can need.
struct Capacity {
  int32_t num_ranks = 0;
  int32_t num_experts = 0;
  int32_t slots_per_rank = 0;
  int32_t num_local_experts = 0;  // of this rank
  int32_t num_segments = 0;
  int32_t num_grad_segments = 0;
  int32_t num_banks = 1;
  int32_t num_domains = 1;  // that plans may cross

  UEC_HD int64_t replicas() const { return static_cast<int64_t>(num_ranks) * slots_per_rank; }
  UEC_HD int64_t entries() const {  // of a schedule
    return min64(static_cast<int64_t>(num_experts) * num_domains, replicas());
  }
  UEC_HD int64_t pieces() const { return num_local_experts + replicas() + slots_per_rank; }
  UEC_HD int64_t reductions() const {  // where slots hold gradients
    return num_grad_segments > 0 ? pieces() + slots_per_rank : 0;
  }
  UEC_HD int64_t striped() const { return max64(pieces(), reductions()); }
  // A rank sends what it has once for each domain, and fills its own slots.
  UEC_HD int64_t tasks() const {
    const int64_t instances = num_local_experts + slots_per_rank;
    return min64(instances * num_domains, max64(instances, replicas()));
  }
  UEC_HD int64_t tiled_segments() const { return max64(num_segments, num_grad_segments); }
};

struct CallArrays {
  Worklist work;              // no counts
  int32_t* arrived;           // [tasks or reductions]
  int32_t* segment;           // [segments]
  int64_t* bytes;             // [segments]
  int64_t* first_tile;        // [segments + 1]
  const uint8_t** main_ptrs;  // [segments][M]
  GradType* main_type;        // [segments] of main gradients

  // Cuts them out of `base`, aligned to 8 bytes; null: only the size. Returns the bytes used.
  UEC_HD static int64_t cut(std::byte* base, const Capacity& c, CallArrays* arrays) {
    ScratchCutter cutter(base);
    const int64_t tasks = c.tasks();
    const int64_t segments = c.tiled_segments();
    arrays->bytes = cutter.take<int64_t>(segments);
    arrays->first_tile = cutter.take<int64_t>(segments + 1);
    arrays->main_ptrs = cutter.take<const uint8_t*>(segments * c.num_local_experts);
    arrays->segment = cutter.take<int32_t>(segments);
    arrays->main_type = cutter.take<GradType>(c.num_grad_segments);
    // A call has one or the other, so they share memory.
    std::byte* const pieces =
        cutter.take_bytes(max64(tasks * static_cast<int64_t>(sizeof(Task)) +
                                    c.pieces() * static_cast<int64_t>(sizeof(Piece)),
                                c.reductions() * static_cast<int64_t>(sizeof(Reduction))));
    arrays->work.tasks = reinterpret_cast<Task*>(pieces);
    arrays->work.pieces = reinterpret_cast<Piece*>(arrays->work.tasks + tasks);
    arrays->work.reductions = reinterpret_cast<Reduction*>(pieces);
    arrays->work.destinations = cutter.take<Destination>(2 * c.replicas() + 1);
    arrays->work.expected = cutter.take<Expected>(2 * c.replicas() + 1);
    arrays->work.opens = reinterpret_cast<uint8_t*>(cutter.take_bytes(3 * c.num_ranks));
    arrays->work.involved = arrays->work.opens + c.num_ranks;
    arrays->work.needs = arrays->work.involved + c.num_ranks;
    arrays->arrived = cutter.take<int32_t>(max64(tasks, c.reductions()));
    return round_up(cutter.used_bytes(), 8);
  }

  UEC_HD void bind_arrays(Call* call) const {
    call->work.tasks = work.tasks;
    call->work.pieces = work.pieces;
    call->work.destinations = work.destinations;
    call->work.expected = work.expected;
    call->work.opens = work.opens;
    call->work.involved = work.involved;
    call->work.needs = work.needs;
    call->work.reductions = work.reductions;
    call->arrived = arrived;
    call->tiles.segment = segment;
    call->tiles.bytes = bytes;
    call->tiles.first_tile = first_tile;
    call->addresses.main_ptrs = main_ptrs;
    call->main_type = main_type;
  }
};

}  // namespace uec
