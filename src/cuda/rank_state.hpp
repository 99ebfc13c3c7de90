// What a rank's kernels know of it for the group's life: its tables, and the state that names them.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>
#include <vector>

#include "core/base/digest.hpp"
#include "cuda/device/block.hpp"
#include "cuda/device/tables.hpp"
#include "engine/config.hpp"

namespace uec::cuda {

// Fills `tables` and `banks`, and returns a state that names them, `moved` behind where they are
// now. Empty `far`, `pes`: not needed.
inline RankState make_rank_state(const EngineConfig& config, const EngineLayout& layout,
                                 const std::vector<uint8_t>& far, const std::vector<int32_t>& pes,
                                 const Tables& tables, const BankTables& banks, uint64_t moved) {
  const auto nanoseconds = [](double seconds) { return static_cast<uint64_t>(seconds * 1e9); };
  const auto put = [&](const auto& from, auto* to) {
    std::transform(from.begin(), from.end(), to, [](auto value) {
      return std::bit_cast<std::remove_reference_t<decltype(*to)>>(value);
    });
    return reinterpret_cast<uint64_t>(to) + moved;
  };
  RankState state;
  state.rank = config.rank;
  state.num_ranks = static_cast<int32_t>(config.domain.size());
  state.capacity = layout.capacity(config);
  state.layout = layout.symmetric;
  state.memory = reinterpret_cast<uint64_t>(config.bases[config.rank]);
  state.bases = put(config.bases, tables.bases);
  state.far = far.empty() ? 0 : put(far, tables.far);
  state.tables_end = put(pes, tables.pes);
  state.pes = pes.empty() ? 0 : state.tables_end.address;
  state.segment_bytes = put(config.segment_bytes, tables.segment_bytes);
  state.grad_bytes = put(config.grad_bytes, tables.grad_bytes);
  state.grad_type = put(config.grad_type, tables.grad_type);
  state.home = put(config.home, tables.home);
  state.domain = put(config.domain, tables.domain);
  state.local_idx = put(layout.local_idx, tables.local_idx);
  std::fill_n(tables.counts, config.num_experts, 0);
  state.counts = reinterpret_cast<uint64_t>(tables.counts) + moved;
  const int64_t slots = state.capacity.replicas();
  std::fill_n(banks.resident, config.num_banks * slots, -1);
  for (int32_t i = 0; i < config.num_banks; ++i) {
    const uint64_t at = reinterpret_cast<uint64_t>(banks.resident + i * slots) + moved;
    banks.tables[i] = {.resident = reinterpret_cast<int32_t*>(at)};
  }
  state.banks = reinterpret_cast<uint64_t>(banks.tables) + moved;
  int64_t* offset = banks.offsets;
  for (int32_t i = 0; i < config.num_banks; ++i) {
    offset = std::copy_n(layout.slots_of(i), config.segment_bytes.size(), offset);
    offset = std::copy_n(layout.gradients(config, i).offset, config.grad_bytes.size(), offset);
  }
  state.offsets = reinterpret_cast<uint64_t>(banks.offsets) + moved;
  std::fill_n(banks.ready, int64_t{config.num_banks} * config.slots_per_rank, 0);
  state.slot_words = reinterpret_cast<uint64_t>(banks.ready) + moved;
  state.tile_bytes = config.tile_bytes;
  state.cost = config.cost;
  state.allow_cross_domain = config.allow_cross_domain;
  state.tiles_at = tiles_offset(state.capacity);
  state.scratch_layout.cut(reinterpret_cast<std::byte*>(kPrepareBytes), state.capacity);
  state.call_limit_ns = nanoseconds(config.call_timeout);
  state.wait_limit_ns = nanoseconds(config.wait_timeout);
  state.digest = config.initial_digest();
  return state;
}

// A call's block on the host: what a rank's kernels get of a call whose plan is there. The
// addresses of main weights or gradients are in the call's arrays. `region`: as in DeviceCall.
inline void pack_call(Call& call, const Capacity& capacity, const Tables& tables,
                      const BankTables& banks, bool has_far, const uint64_t* region,
                      uint64_t digest, std::byte* block) {
  call.addresses = {.bases = reinterpret_cast<uint8_t* const*>(tables.bases),
                    .segment_bytes = tables.segment_bytes,
                    .slot_offset = banks.offsets,
                    .main_ptrs = call.addresses.main_ptrs,
                    .num_local_experts = capacity.num_local_experts,
                    .far = has_far ? tables.far : nullptr};
  if (call.grads.num_segments > 0)
    call.grads = {call.grads.num_segments, tables.grad_bytes, tables.grad_type,
                  banks.offsets + capacity.num_segments};
  take_region(call.addresses, region, capacity.num_ranks);
  pack_arrays(SingleThread{}, call, capacity, tables.pes, block);
  pack_header(SingleThread{}, call, capacity, tables.pes, digest, block);
}

}  // namespace uec::cuda
