// One call on one rank: what its workers share, and what their steps return.
//
// A worker that moves tiles has two sides. The fetch side (fetcher.hpp) takes groups and loads
// their tiles into a ring of stages; the store side (storer.hpp) stores them to all destinations
// and publishes what has been delivered. Both are non-blocking steps: a host thread alternates them
// (worker.hpp), a device drives each from a warp of its own, the tests interleave those of all
// ranks. A worker of a gradient reduction has one side, and no ring (reducer.hpp).
#pragma once

#include "core/base/team.hpp"
#include "core/schedule/tiles.hpp"
#include "core/schedule/worklist.hpp"
#include "core/transfer/gradients.hpp"
#include "core/transfer/layout.hpp"
#include "core/transfer/protocol.hpp"

namespace uec {

enum class Step : int32_t {
  kProgress,        // something was taken, loaded, stored or published
  kAwaitDelivered,  // loads or stores are in flight, nothing else can be done
  kNeedsFetch,      // store side: nothing is left to do until more has been fetched
  kWaitsForPeer,    // a peer has to move first: wait() says which
  kFinished,        // nothing is left to take, load, store or publish
  kFailed,          // fault() and wait() say why
};

// Where bytes live. `bases` are the symmetric memories of all ranks as seen from this one.
struct Addresses {
  uint8_t* const* bases = nullptr;         // [G], null: no load/store access
  const int64_t* segment_bytes = nullptr;  // [num_segments] of one expert
  const int64_t* slot_offset = nullptr;    // [num_segments] of slot 0 of the call's bank
  const uint8_t* const* main_ptrs =
      nullptr;  // [num_segments][num_local_experts] this rank's main weights
  int32_t num_local_experts = 0;
  const uint8_t* const* regions = nullptr;  // [G] pull: main weights that peers can address
  const int64_t* region_offset =
      nullptr;                   // [num_segments] where each one's main weights begin there
  const uint8_t* far = nullptr;  // [G] 1: reached by puts and signals; null: none is

  // The offset of a slot's bytes of a segment in its rank's symmetric memory.
  UEC_HD int64_t slot_at(int32_t segment, int32_t slot) const {
    return slot_offset[segment] + slot * segment_bytes[segment];
  }
  UEC_HD bool reaches(int32_t rank) const {
    return bases[rank] != nullptr || (far != nullptr && far[rank]);
  }
};

// What one call on one rank moves, and from where to where.
struct CallBody {
  TileMap tiles;
  Addresses addresses;
  Worklist work;
  Gradients grads;                      // of a reduction
  const GradType* main_type = nullptr;  // [grads.num_segments] of this rank's main gradients
  int32_t* arrived = nullptr;           // [num_tasks or num_reductions] groups, or workers, whose
                                        // bytes are delivered: see finish_share(), publish_group()
};

// One call on one rank, shared by its workers. Arrays live in the rank's private memory.
struct Call : CallBody {
  int32_t rank = 0;
  int32_t num_ranks = 0;
  Epoch epoch;
  SymmetricLayout layout;

  // Must run before workers begin; the code that starts them orders that.
  template <class Team>
  UEC_HD void reset_counters(Team team) {
    const int32_t counters = max32(work.num_tasks, work.num_reductions);
    for (int32_t i = team.index(); i < counters; i += team.size()) arrived[i] = 0;
  }
};

// A rank that failed in this call or before it, and so will not do its part; -1: none.
template <class Memory>
UEC_HD int32_t find_abort(Memory& memory, const SymmetricLayout& layout, const Epoch& epoch) {
  typename Memory::Team team;
  uint32_t first = ~0u;
  for (int32_t r = team.index(); r < layout.num_ranks; r += team.size()) {
    if (!AbortWord{memory.observe(layout.abort(r))}.ends(epoch.number)) continue;
    first = static_cast<uint32_t>(r);
    break;
  }
  first = team.min_sync(first);
  return static_cast<int32_t>(first);  // ~0: -1
}

}  // namespace uec
