// The arrays of one call: one table gives their size and their addresses, on host and device.
#pragma once

#include <cstddef>

#include "core/scratch.hpp"
#include "core/stream.hpp"

namespace uec {

// What a group and a rank of it can need at most.
struct Capacity {
  int32_t num_ranks = 0;
  int32_t num_experts = 0;
  int32_t slots_per_rank = 0;
  int32_t num_mains = 0;  // of this rank
  int32_t num_segments = 0;

  UEC_HD int64_t replicas() const { return static_cast<int64_t>(num_ranks) * slots_per_rank; }
  UEC_HD int64_t pieces() const { return num_mains + replicas() + slots_per_rank; }
};

struct CallArrays {
  Worklist work;          // no counts
  int32_t* cursor;        // [pieces]
  int32_t* remaining;     // [tasks]
  int32_t* segment;       // [segments]
  int64_t* bytes;         // [segments]
  int64_t* first_tile;    // [segments + 1]
  const uint8_t** mains;  // [segments][mains]

  // Cuts them out of `base`, aligned to 8 bytes; null: only the size. Returns the bytes used.
  UEC_HD static int64_t cut(std::byte* base, const Capacity& c, CallArrays* arrays) {
    ScratchCutter cutter(base);
    const int64_t tasks = c.num_mains + c.slots_per_rank;
    arrays->bytes = cutter.take<int64_t>(c.num_segments);
    arrays->first_tile = cutter.take<int64_t>(c.num_segments + 1);
    arrays->mains = cutter.take<const uint8_t*>(static_cast<int64_t>(c.num_segments) * c.num_mains);
    arrays->segment = cutter.take<int32_t>(c.num_segments);
    arrays->work.tasks = cutter.take<Task>(tasks);
    arrays->work.pieces = cutter.take<Piece>(c.pieces());
    arrays->work.destinations = cutter.take<Destination>(2 * c.replicas() + 1);
    arrays->work.expected = cutter.take<Expected>(2 * c.replicas() + 1);
    arrays->cursor = cutter.take<int32_t>(c.pieces());
    arrays->remaining = cutter.take<int32_t>(tasks);
    arrays->work.opens = cutter.take<uint8_t>(c.num_ranks);
    arrays->work.involved = cutter.take<uint8_t>(c.num_ranks);
    arrays->work.needs = cutter.take<uint8_t>(c.num_ranks);
    return round_up(cutter.used_bytes(), 8);
  }

  // Gives a call its arrays.
  UEC_HD void lend_to(Call* call) const {
    call->work = work;
    call->cursor = cursor;
    call->remaining = remaining;
    call->tiles.segment = segment;
    call->tiles.bytes = bytes;
    call->tiles.first_tile = first_tile;
    call->addresses.mains = mains;
  }
};

}  // namespace uec
