// A rank's tables in device memory, which its RankState points to. All but the counts and the
// banks' are constant.
#pragma once

#include "core/transfer/bank.hpp"
#include "core/transfer/call_arrays.hpp"

namespace uec::cuda {

struct Tables {
  uint64_t* bases;         // [G]
  int64_t* segment_bytes;  // [segments]
  int64_t* grad_bytes;     // [grad segments]
  GradType* grad_type;     // [grad segments]
  uint8_t* far;            // [G]
  int32_t* pes;            // [G]. From here on: not what calls point to
  int32_t* home;           // [E]
  int32_t* domain;         // [G]
  int32_t* local_idx;      // [E]
  int32_t* counts;         // [E] zero between launches

  // Works as CallArrays::cut().
  UEC_HD static int64_t cut(std::byte* base, const Capacity& c, Tables* tables) {
    ScratchCutter cutter(base);
    tables->bases = cutter.take<uint64_t>(c.num_ranks);
    tables->segment_bytes = cutter.take<int64_t>(c.num_segments);
    tables->grad_bytes = cutter.take<int64_t>(c.num_grad_segments);
    tables->grad_type = cutter.take<GradType>(c.num_grad_segments);
    tables->far = cutter.take<uint8_t>(c.num_ranks);
    tables->pes = cutter.take<int32_t>(c.num_ranks);
    tables->home = cutter.take<int32_t>(c.num_experts);
    tables->domain = cutter.take<int32_t>(c.num_ranks);
    tables->local_idx = cutter.take<int32_t>(c.num_experts);
    tables->counts = cutter.take<int32_t>(c.num_experts);
    return round_up(cutter.used_bytes(), 8);
  }
};

// What the rank knows of the slots of all ranks: where they are, and what its calls keep up to
// date.
struct BankTables {
  BankTable* tables;  // [banks]
  int64_t* offsets;  // [banks][segments + grad segments] of slots, then of slot gradients; constant
  int32_t* resident;  // [banks][G][S]
  uint64_t* ready;    // [banks][S] of this rank's slots, as in ready.cuh

  // The row of a bank, or of bank 0 (-1: none).
  UEC_HD static const int64_t* row(const int64_t* rows, const Capacity& c, int32_t bank) {
    return rows + int64_t{max32(bank, 0)} * row_size(c);
  }
  UEC_HD static int32_t row_size(const Capacity& c) { return c.num_segments + c.num_grad_segments; }

  UEC_HD static int64_t cut(std::byte* base, const Capacity& c, BankTables* banks) {
    ScratchCutter cutter(base);
    banks->tables = cutter.take<BankTable>(c.num_banks);
    banks->offsets = cutter.take<int64_t>(int64_t{c.num_banks} * row_size(c));
    banks->ready = cutter.take<uint64_t>(int64_t{c.num_banks} * c.slots_per_rank);
    banks->resident = cutter.take<int32_t>(c.num_banks * c.replicas());
    return round_up(cutter.used_bytes(), 8);
  }
};

}  // namespace uec::cuda
