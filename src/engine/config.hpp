// The description of a group, and the offsets that every rank computes from it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/schedule/cost.hpp"
#include "core/transfer/call_arrays.hpp"
#include "core/transfer/layout.hpp"
#include "core/transfer/prepare.hpp"

namespace uec {

// Equal on every rank, except `rank`, `bases` and the descriptors.
struct EngineConfig {
  int32_t rank = 0;
  int32_t num_experts = 0;
  int32_t slots_per_rank = 0;
  std::vector<int32_t> home;    // [E]
  std::vector<int32_t> domain;  // [G]
  bool allow_cross_domain = false;
  std::vector<int64_t> segment_bytes;  // of one expert
  std::vector<int64_t> grad_bytes;  // [grad segments] of one expert in a slot; none: no gradients
  std::vector<GradType> grad_type;  // [grad segments] in a slot
  int32_t num_banks = 1;            // sets of slots
  int32_t num_grad_banks = 1;       // sets of slot gradients; bank b has set b modulo their number
  int64_t instance_align = 0;  // of slots with room for local experts before them; 0: there is none
  int64_t tile_bytes = 32 << 10;
  int32_t num_workers = 1;
  double call_timeout = 1800;  // seconds until every rank of the plan has called; 0: no limit
  double wait_timeout = 30;    // seconds for each wait from then on; 0: no limit
  CostModel cost;
  std::vector<uint8_t*> bases;  // [G] symmetric memories, zeroed, of SymmetricLayout::total bytes
  std::vector<uint8_t*> check_bases;  // [G] check regions, zeroed, of CheckLayout::total bytes;
                                      // empty: slots are not checked
  std::vector<int> peer_pipes;        // [G] at end-of-file once the peer has ended; -1: unknown
  // [G] or empty: readable once the peer's process has ended, even if a child holds its pipe; or
  // -1.
  std::vector<int> peer_processes;

  // Borrows the vectors.
  Topology topology() const {
    return {static_cast<int32_t>(domain.size()),
            num_experts,
            slots_per_rank,
            home.data(),
            domain.data(),
            allow_cross_domain};
  }
  // A digest of what the ranks of one group must have in common before any call.
  uint64_t initial_digest() const;
};

inline constexpr int64_t kCheckBlock = 4096;  // bytes with a sum of their own

// A rank's check region, of host/slot_check.hpp: [M][G] `checked` flags, and what follows.
struct CheckLayout {
  int64_t verdicts = 0;              // [G]
  int64_t sums = 0;                  // [M][blocks]
  int64_t copies = 0;                // of main weights, as in a region
  int64_t blocks = 0;                // of an expert
  std::vector<int64_t> first_block;  // [segments]
  int64_t total = 0;
};

struct EngineLayout {
  explicit EngineLayout(const EngineConfig& config);

  // `config` and this are borrowed.
  GroupTables tables(const EngineConfig& config) const;
  Capacity capacity(const EngineConfig& config) const;
  Gradients gradients(const EngineConfig& config, int32_t bank = 0) const;
  const int64_t* slots_of(int32_t bank) const {  // [segments]; -1: no bank, with the slots of 0
    return slot_offset.data() + std::max(bank, 0) * region_offset.size();
  }

  SymmetricLayout symmetric;
  std::vector<int64_t> slot_offset;    // [banks][segments] in symmetric memory
  std::vector<int64_t> grad_offset;    // [grad_banks][grad segments] likewise, of slot gradients
  std::vector<int64_t> region_offset;  // [segments] in a region of main weights
  int64_t region_bytes = 0;
  // Layout of memory like a bank of the symmetric one, if that has room for local experts: where
  // the slots of each segment lie, and its bytes.
  int64_t instance_align = 0;
  std::vector<int64_t> instance_offset, grad_instance_offset;
  int64_t instance_bytes = 0, grad_instance_bytes = 0;
  std::vector<int32_t> local_idx;          // [E] index among the home's local experts
  std::vector<int32_t> num_local_experts;  // [G]
  int32_t max_local_experts = 0;
  CheckLayout check;
};

}  // namespace uec
