// How a block of the reroute learns how many tokens of each expert came before its own.
//
// The ids, or the tokens of a map, are cut into runs, one for each block. A block counts its own
// run, publishes that before it waits for anything, and sums what the blocks before it have
// published: a single hop. Where there are more runs than a window has, the last block of each
// window also publishes its sum, for the blocks of the next.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/device/reroute_args.hpp"
#include "cuda/device/warp.cuh"

namespace uec::cuda {

struct RerouteBlock {
  RerouteShape shape;
  RerouteState* state;
  RerouteArrays arrays;
  RerouteShared shared;
  uint64_t launch;
  int32_t run;

  UEC_DEVICE bool is_last_run() const { return run == ptx::num_blocks_x() - 1; }
  UEC_DEVICE int32_t window() const { return run >> shape.window_log2; }
  UEC_DEVICE int32_t first_of_window() const { return window() << shape.window_log2; }
  UEC_DEVICE bool ends_window() const { return (run + 1) >> shape.window_log2 != window(); }
};

UEC_DEVICE int32_t warp_idx() { return ptx::thread_idx() / ptx::kWarpSize; }
UEC_DEVICE int32_t num_warps() { return ptx::num_threads() / ptx::kWarpSize; }

// body(i) for each i below `count`, by the block's threads. Not unrolled: computing the number of
// rounds would cost a division, and there is usually one round.
template <class Body>
UEC_DEVICE void by_threads(int32_t count, Body&& body) {
#pragma unroll 1
  for (int32_t i = ptx::thread_idx(); i < count; i += ptx::num_threads()) body(i);
}

// Draws a run, copies the table, and zeroes the counts. False: the plan is invalid.
UEC_DEVICE bool enter(const RerouteArgs& args, std::byte* shared_memory, RerouteBlock& block) {
  block.shape = args.shape;
  block.state = args.state;
  RerouteShared::Entry drawn{};
  if (ptx::thread_idx() == 0) {
    // Drawn, because blocks may begin in any order: no block waits for a run that has no running
    // block. Which block draws which run makes no difference.
    drawn.run = ptx::fetch_add_relaxed(&block.state->entered, 1);
    drawn.launch = block.state->launches + 1;
    drawn.refused = block.state->plan_status.fault != RerouteFault::kNone;
  }
  RerouteArrays::cut(reinterpret_cast<std::byte*>(block.state), args.shape, &block.arrays);
  RerouteShared& shared = block.shared;
  RerouteShared::cut(shared_memory, args.shape, ptx::num_threads(), num_warps(), &shared);
  const int32_t num_experts = args.shape.num_experts;
  const auto num_entries =
      static_cast<int32_t>(args.shape.num_entries());  // at least one an expert
  by_threads(num_entries + 1, [&](int32_t i) {
    // Issues both loads at once: neither depends on whether its value is needed.
    const int32_t begin = block.arrays.table.begin[min32(i, num_experts)];
    const ShareEntry entry = block.arrays.table.entries[min32(i, num_entries - 1)];
    if (i <= num_experts) shared.begin[i] = begin;
    if (i < num_entries) shared.entries[i] = entry;
  });
  const auto quads = static_cast<int32_t>(shared.counts_bytes(args.shape, num_warps()) / 16);
  by_threads(quads, [&](int32_t i) { reinterpret_cast<uint4*>(shared.counts)[i] = uint4{}; });
  if (ptx::thread_idx() == 0) *shared.entry = drawn;
  ptx::sync_block();
  block.run = shared.entry->run;
  block.launch = shared.entry->launch;
  return shared.entry->refused == 0;
}

// Replaces each warp's counts by those of the warps before it, and publishes the run's.
UEC_DEVICE void publish_counts(const RerouteBlock& block) {
  ptx::sync_block();
  const int32_t num_experts = block.shape.num_experts;
  uint32_t* const row = block.arrays.counts + block.run * block.shape.row();
  by_threads(num_experts, [&](int32_t e) {
    int32_t sum = 0;
#pragma unroll 1
    for (int32_t w = 0; w < num_warps(); w += kCountsAtOnce) {
      uint16_t* const count = block.shared.counts + w * num_experts + e;
      const int32_t left = num_warps() - w;
      int32_t counts[kCountsAtOnce];
#pragma unroll
      for (int32_t i = 0; i < kCountsAtOnce; ++i) counts[i] = i < left ? count[i * num_experts] : 0;
#pragma unroll
      for (int32_t i = 0; i < kCountsAtOnce; ++i) {
        if (i < left) count[i * num_experts] = static_cast<uint16_t>(sum);
        sum += counts[i];
      }
    }
    block.shared.total[e] = sum;
    row[e] = static_cast<uint32_t>(sum);
  });
  ptx::sync_block();
  // Release: pairs with await_counts() of every later block in the window, which reads the row.
  if (ptx::thread_idx() == 0)
    ptx::store_release_device(&block.arrays.counted[block.run], block.launch);
}

// Needs no clock: it waits for a running block, or for one that such a block waits for.
UEC_DEVICE void await_flag(const uint64_t* flag, uint64_t launch) {
  while (ptx::load_acquire_device(flag) != launch) ptx::pause();
}

// Acquires the counts of the window's runs before this one, and the sum before the window.
UEC_DEVICE void await_counts(const RerouteBlock& block) {
  const int32_t window = block.window(), first = block.first_of_window();
  by_threads(block.run - first,
             [&](int32_t i) { await_flag(&block.arrays.counted[first + i], block.launch); });
  if (window > 0 && ptx::thread_idx() == ptx::num_threads() - 1)
    await_flag(&block.arrays.summed[window - 1], block.launch);
  ptx::sync_block();
}

UEC_DEVICE void add(uint4& sum, const uint4& row) {
  sum.x += row.x;
  sum.y += row.y;
  sum.z += row.z;
  sum.w += row.w;
}

// Sets `base`. Groups of threads each take a share of the rows, so that all loads are in flight
// together.
UEC_DEVICE void sum_runs(const RerouteBlock& block) {
  const auto quads = static_cast<int32_t>(block.shape.row() / 4);
  const int32_t width = quads < ptx::num_threads() ? quads : ptx::num_threads();
  const int32_t num_groups = ptx::num_threads() / width;
  const int32_t group = ptx::thread_idx() / width;
  const int32_t window = block.window();
  const auto* const counts = reinterpret_cast<const uint4*>(block.arrays.counts);
  const auto* const sums = reinterpret_cast<const uint4*>(block.arrays.sums);
  auto* const partial = reinterpret_cast<uint4*>(block.shared.partial);
  await_counts(block);
#pragma unroll 1
  for (int32_t q = ptx::thread_idx() - group * width; group < num_groups && q < quads; q += width) {
    uint4 sum{0, 0, 0, 0};
    if (window > 0 && group == 0) sum = ptx::load_global(sums + (window - 1) * quads + q);
    const int32_t first = block.first_of_window() + group, step = num_groups * quads;
    const uint4* row = counts + first * quads + q;
    int32_t left = block.run - first;
#pragma unroll 1
    while (left > 0) {
      uint4 rows[kRowsInFlight];
#pragma unroll
      for (int32_t i = 0; i < kRowsInFlight; ++i, row += step, left -= num_groups)
        rows[i] = left > 0 ? ptx::load_global(row) : uint4{};
#pragma unroll
      for (const uint4& counted : rows) add(sum, counted);
    }
    partial[group * quads + q] = sum;
  }
  ptx::sync_block();

  const bool ends_window = block.ends_window();
  uint32_t* const sum_row = block.arrays.sums + window * block.shape.row();
  by_threads(block.shape.num_experts, [&](int32_t e) {
    uint32_t sum = 0;
    for (int32_t g = 0; g < num_groups; ++g) sum += block.shared.partial[(g * quads) * 4 + e];
    block.shared.base[e] = static_cast<int32_t>(sum);
    if (ends_window || block.is_last_run())
      sum_row[e] = sum + static_cast<uint32_t>(block.shared.total[e]);
  });
  ptx::sync_block();
  // Release: pairs with await_counts() of the next window's blocks.
  if (ends_window && ptx::thread_idx() == 0)
    ptx::store_release_device(&block.arrays.summed[window], block.launch);
}

// By the last run, which knows all counts: checks that they are those that the shares were made
// for.
UEC_DEVICE void check_totals(const RerouteBlock& block) {
  const RerouteShared& shared = block.shared;
  by_threads(block.shape.num_experts, [&](int32_t e) {
    if (shared.base[e] + shared.total[e] != shared.entries[shared.begin[e + 1] - 1].upto)
      ptx::max_relaxed(&block.state->fault, fault_word(FaultStage::kCount, e));
  });
}

// Where the warp's next token of an expert goes, if `ordinal` of its tokens came before it.
UEC_DEVICE int32_t instance_of(const RerouteBlock& block, int32_t expert, int32_t ordinal) {
  const RerouteShared& shared = block.shared;
  const int32_t before =
      shared.base[expert] + shared.counts[warp_idx() * block.shape.num_experts + expert];
  return find_instance(shared.begin, shared.entries, expert, before + ordinal);
}

// Reports a fault to the host, unless one is pending there.
UEC_DEVICE void put_fault(RerouteFaultBox* box, const RerouteStatus& status, Routing routing) {
  if (status.fault == RerouteFault::kNone) return;
  RerouteFaultBox& said = *box;
  // Acquire: pairs with the host's release after it has read the last fault, and freed its place.
  if (ptx::load_acquire_system(&said.routing) != 0) return;
  said.status = status;
  // Release: pairs with the host's acquire, which finds the status complete.
  ptx::store_release_system(&said.routing, static_cast<uint64_t>(routing));
}

// The last block to come here reports a fault, and leaves everything as the next launch needs it.
// Before what a block stores: nothing that follows reads what that resets, and the arrival does not
// wait for the stores. `id_at`: the id at a position.
template <class IdAt>
UEC_DEVICE void leave(const RerouteArgs& args, const RerouteBlock& block, IdAt&& id_at) {
  ptx::sync_block();
  if (ptx::thread_idx() != 0) return;
  RerouteState& state = *block.state;
  // Acquire-release: the faults and sums of all blocks come before what the last one does.
  if (ptx::fetch_add_acq_rel(&state.left, 1) != ptx::num_blocks_x() - 1) return;
  RerouteStatus status = state.plan_status;
  if (state.fault != 0) {
    const int64_t position = fault_position(state.fault);
    if (fault_stage(state.fault) == FaultStage::kId) {
      status.fault = RerouteFault::kIdOutOfRange;
      status.position = position;
      status.value = id_at(position);
    } else {
      const int64_t window = (ptx::num_blocks_x() - 1) >> block.shape.window_log2;
      status.fault = RerouteFault::kCountMismatch;
      status.expert = static_cast<int32_t>(position);
      status.counted = block.arrays.sums[window * block.shape.row() + position];
      status.expected = block.shared.entries[block.shared.begin[position + 1] - 1].upto;
    }
  }
  put_fault(args.fault, status, args.routing);
  state.fault = 0;
  state.entered = 0;
  state.left = 0;
  ++state.launches;
}

}  // namespace uec::cuda
