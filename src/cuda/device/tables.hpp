// A rank's tables in device memory, which its RankState points to. All but the counts and the
// banks' are constant.
#pragma once

#include "core/transfer/bank.hpp"
#include "core/transfer/call_arrays.hpp"

namespace uec::cuda {

struct Tables {
  uint64_t* bases;         // [G]
  int64_t* segment_bytes;  // [segments]
  int64_t* slot_offset;    // [segments]
  int64_t* region_offset;  // [segments]
  int64_t* grad_bytes;     // [grad segments]
  int64_t* grad_offset;    // [grad segments]
  GradType* grad_type;     // [grad segments]
  uint8_t* far;            // [G]
  int32_t* pes;            // [G]. From here on: not what calls point to
  int32_t* home;           // [E]
  int32_t* domain;         // [G]
  int32_t* main_idx;       // [E]
  int32_t* counts;         // [E] zero between launches

  // As CallArrays::cut().
  UEC_HD static int64_t cut(std::byte* base, const Capacity& c, Tables* tables) {
    ScratchCutter cutter(base);
    tables->bases = cutter.take<uint64_t>(c.num_ranks);
    tables->segment_bytes = cutter.take<int64_t>(c.num_segments);
    tables->slot_offset = cutter.take<int64_t>(c.num_segments);
    tables->region_offset = cutter.take<int64_t>(c.num_segments);
    tables->grad_bytes = cutter.take<int64_t>(c.num_grad_segments);
    tables->grad_offset = cutter.take<int64_t>(c.num_grad_segments);
    tables->grad_type = cutter.take<GradType>(c.num_grad_segments);
    tables->far = cutter.take<uint8_t>(c.num_ranks);
    tables->pes = cutter.take<int32_t>(c.num_ranks);
    tables->home = cutter.take<int32_t>(c.num_experts);
    tables->domain = cutter.take<int32_t>(c.num_ranks);
    tables->main_idx = cutter.take<int32_t>(c.num_experts);
    tables->counts = cutter.take<int32_t>(c.num_experts);
    return round_up(cutter.used_bytes(), 8);
  }
};

// What the rank knows of the slots of all ranks, which its calls keep up to date.
struct BankTables {
  BankTable* tables;  // [banks]
  int32_t* resident;  // [banks][G][S]
  uint64_t* ready;    // [banks][S] of this rank's slots, as in ready.cuh

  UEC_HD static int64_t cut(std::byte* base, const Capacity& c, BankTables* banks) {
    ScratchCutter cutter(base);
    banks->tables = cutter.take<BankTable>(c.num_banks);
    banks->ready = cutter.take<uint64_t>(int64_t{c.num_banks} * c.slots_per_rank);
    banks->resident = cutter.take<int32_t>(c.num_banks * c.replicas());
    return round_up(cutter.used_bytes(), 8);
  }
};

}  // namespace uec::cuda
