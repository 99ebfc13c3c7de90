// Turns a plan into its modelled transfer: the core's schedule and worklists, for all ranks at
// once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/transfer/prepare.hpp"
#include "model/relays.hpp"
#include "model/simulation.hpp"

namespace uec::model {

struct Transfer {
  Topology topology;                     // with relays, of one domain
  const int32_t* slot_expert = nullptr;  // [G][S], legal
  const int32_t* resident = nullptr;     // [G][S] as in SlotsToFill
  std::vector<int64_t> segment_bytes;
  int64_t tile_bytes = 0;
  int32_t mode = -1;  // a Mode, or -1: by cost
  bool may_pull = false;
  CostModel cost;
  // A reduction: segments are those of slot gradients, of these types, and nothing is relayed.
  std::vector<GradType> grad_type{};
  bool zero = true;             // slots are cleared
  std::vector<int32_t> parent;  // [R] of relays; empty: the core's schedule
  int32_t chunk_tiles = 1;

  bool reduces() const { return !grad_type.empty(); }
};

struct Result {
  Mode mode = Mode::kDirect;
  Outcome outcome;
};

// Throws std::overflow_error where addresses would overlap, or memory would run out.
inline void check_sizes(const SymmetricLayout& layout, const Machine& machine) {
  const int64_t ranks = layout.num_ranks;
  const auto check = [](const char* what, int64_t count, int32_t most_bits) {
    if (count > int64_t{1} << most_bits)
      throw std::overflow_error(std::string(what) + ": " + std::to_string(count) +
                                ", expected at most 2**" + std::to_string(most_bits));
  };
  check("bytes of a rank's slots", layout.total, kRankShift - 1);
  check("bytes of all ranks' flags", ranks * layout.gathered_base, 31);
  check("tiles in flight of all ranks", ranks * machine.workers * machine.stages, 20);
}

// Makes the schedule once, as every rank would, and runs it. Throws as check_sizes() and World do.
inline Result model_transfer(const Transfer& transfer, const Machine& machine, bool keeps_spans) {
  const Topology& t = transfer.topology;
  const auto num_segments = static_cast<int32_t>(transfer.segment_bytes.size());
  std::vector<int32_t> num_local_experts(t.num_ranks), local_idx(t.num_experts),
      segment(num_segments);
  for (int32_t e = 0; e < t.num_experts; ++e) local_idx[e] = num_local_experts[t.home[e]]++;
  std::iota(segment.begin(), segment.end(), 0);
  std::vector<int64_t> first_tile(1), slot_offset(num_segments), region_offset(num_segments);
  for (const int64_t bytes : transfer.segment_bytes)
    first_tile.push_back(first_tile.back() + ceil_div(bytes, transfer.tile_bytes));
  const TileMap tiles{num_segments,
                      segment.data(),
                      transfer.segment_bytes.data(),
                      first_tile.data(),
                      transfer.tile_bytes,
                      transfer.parent.empty() ? TileMap::tiles_per_group(transfer.tile_bytes)
                                              : transfer.chunk_tiles};

  const Gradients grads{transfer.reduces() ? num_segments : 0, transfer.segment_bytes.data(),
                        transfer.grad_type.data(), slot_offset.data()};
  const std::set<int32_t> domains(t.domain, t.domain + t.num_ranks);
  Capacity capacity{.num_ranks = t.num_ranks,
                    .num_experts = t.num_experts,
                    .slots_per_rank = t.slots_per_rank,
                    .num_segments = num_segments,
                    .num_grad_segments = grads.num_segments,
                    .num_domains = t.allow_cross_domain ? static_cast<int32_t>(domains.size()) : 1};
  using Block = std::vector<std::byte>;
  ScheduleArrays work;
  Block schedule_block(ScheduleArrays::cut(nullptr, capacity, &work));
  ScheduleArrays::cut(schedule_block.data(), capacity, &work);
  PlanShape shape;
  if (transfer.reduces())
    make_reduction(SingleThread{}, t, tiles, transfer.slot_expert, nullptr, transfer.mode,
                   transfer.cost, work.scratch, &shape, work.schedule);
  else
    make_schedule(SingleThread{}, t, tiles, transfer.slot_expert, transfer.resident, transfer.mode,
                  transfer.may_pull, transfer.cost, work.scratch, &shape, work.schedule);

  const int32_t max_local_experts =
      *std::max_element(num_local_experts.begin(), num_local_experts.end());
  const SymmetricLayout layout =
      SymmetricLayout::make(t, max_local_experts, tiles.num_groups(),
                            transfer.reduces() ? 0 : num_segments, transfer.segment_bytes.data(),
                            slot_offset.data(), grads, transfer.tile_bytes, slot_offset.data());
  check_sizes(layout, machine);
  std::vector<uint8_t*> bases(t.num_ranks);
  for (int32_t r = 0; r < t.num_ranks; ++r) bases[r] = base_of(r);
  const std::vector<const uint8_t*> main_ptrs(static_cast<size_t>(num_segments) * max_local_experts,
                                              base_of(t.num_ranks));

  Job job;
  job.slots_per_rank = t.slots_per_rank;
  job.calls.resize(t.num_ranks);
  std::vector<Block> blocks(t.num_ranks);
  for (int32_t r = 0; r < t.num_ranks; ++r) {
    capacity.num_local_experts = num_local_experts[r];
    CallArrays arrays;
    blocks[r].resize(CallArrays::cut(nullptr, capacity, &arrays));
    CallArrays::cut(blocks[r].data(), capacity, &arrays);
    Call& call = job.calls[r];
    arrays.bind_arrays(&call);
    call.rank = r;
    call.num_ranks = t.num_ranks;
    call.epoch = {1, CallRecord::make(1, 0, RecordKind::kCall)};
    call.layout = layout;
    call.tiles = tiles;
    call.addresses = {.bases = bases.data(),
                      .segment_bytes = transfer.segment_bytes.data(),
                      .slot_offset = slot_offset.data(),
                      .main_ptrs = main_ptrs.data(),
                      .num_local_experts = num_local_experts[r],
                      .regions = bases.data(),
                      .region_offset = region_offset.data()};
    call.grads = grads;
    call.main_type = transfer.grad_type.data();
    if (transfer.reduces())
      build_reductions(SingleThread{}, t, tiles, work.schedule, local_idx.data(), r, transfer.zero,
                       call.work);
    else if (transfer.parent.empty())
      build_worklist(SingleThread{}, t, work.schedule, local_idx.data(), r, call.work);
    else
      build_relays(t, work.schedule, transfer.parent, tiles.num_groups(), local_idx.data(), r,
                   call.work);
    call.reset_counters(SingleThread{});
  }
  const Mode mode = work.schedule.mode;
  if (transfer.reduces())
    return {mode, Simulation<ReductionAgent>(machine, job, keeps_spans).run()};
  return {mode, Simulation<TransferAgent>(machine, job, keeps_spans).run()};
}

}  // namespace uec::model
