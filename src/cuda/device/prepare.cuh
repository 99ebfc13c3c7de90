// Making a call's block on the device, from a plan in its memory: what engine.cc does for a plan on
// the host. The first block of a rank to begin makes it; the others wait for it.
#pragma once

#include <new>

#include "core/plan/check.hpp"
#include "core/transfer/announce.hpp"
#include "core/transfer/bank.hpp"
#include "core/transfer/failure.hpp"
#include "core/transfer/prepare.hpp"
#include "cuda/device/block.hpp"
#include "cuda/device/memory.cuh"
#include "cuda/device/slot_words.cuh"
#include "cuda/device/wait.cuh"

namespace uec::cuda {

// The `i`-th word of a call's header.
UEC_DEVICE void put_header(CallShared& shared, int32_t i, uint64_t word) {
  constexpr int32_t kOwn = offsetof(CallHeader, body) / sizeof(uint64_t);
  auto* const body = reinterpret_cast<uint64_t*>(static_cast<CallBody*>(&shared.block.call));
  *(i < kOwn ? reinterpret_cast<uint64_t*>(&shared.header) + i : body + i - kOwn) = word;
}

UEC_DEVICE Topology topology_of(const RankState& known) {
  const Capacity& c = known.capacity;
  return {c.num_ranks, c.num_experts, c.slots_per_rank,
          known.home,  known.domain,  known.allow_cross_domain != 0};
}

// By one thread: the arguments of schedule_call(), from what the group and the call give.
UEC_DEVICE_NOINLINE void gather_arguments(const RankState& known, const DeviceCall& device,
                                          const LaunchArgs& launch, PrepareShared& made) {
  const Capacity& c = known.capacity;
  GroupTables& tables = made.tables;
  const PrepareArrays& arrays = made.arrays;
  tables.topology = topology_of(known);
  tables.rank = known.rank;
  tables.segment_bytes = known.segment_bytes;
  tables.local_idx = known.local_idx;
  tables.tile_bytes = known.tile_bytes;
  tables.cost = known.cost;
  const auto* const offsets = BankTables::row(known.offsets, c, launch.bank);
  tables.grads = grads_of(known, offsets + c.num_segments);
  arrays.arrays.bind_arrays(&made.call);
  made.call.grads = {};
  Addresses& addresses = made.call.addresses;
  addresses.bases = known.bases;
  addresses.far = known.far;
  addresses.segment_bytes = tables.segment_bytes;
  addresses.slot_offset = offsets;
  addresses.num_local_experts = c.num_local_experts;
  ReplicateArgs& args = made.args;
  args.num_segments = 0;
  for (int32_t i = 0; i < c.num_segments; ++i)
    if ((device.segments >> i & 1) != 0) made.segments[args.num_segments++] = i;
  args.slot_expert = device.slot_expert;
  args.tag = launch.tag;
  args.segments = made.segments;
  args.mode = device.mode;
  args.region = device.region_at == 0 ? -1 : device.region;
  args.bank = {};
  ReduceArgs& reduce = made.reduce;
  for (int32_t i = 0; i < c.num_grad_segments; ++i)
    made.main_type[i] = static_cast<GradType>(device.segments >> i & 1);
  reduce.slot_expert = args.slot_expert;
  reduce.bank = launch.bank;
  reduce.tag = launch.tag;
  reduce.main_type = made.main_type;
  reduce.mode = device.mode;
  reduce.zero = device.zero != 0;
}

// By a warp: where arrays lie. Null pointers and zeros stay.
template <class Arrays>
UEC_DEVICE void place_scratch(const Arrays& layout, PrepareShared& made, Arrays* arrays) {
  const auto* const from = reinterpret_cast<const uint64_t*>(&layout);
  auto* const to = reinterpret_cast<uint64_t*>(arrays);
  for (uint32_t i = Warp::index(); i < sizeof(Arrays) / sizeof(uint64_t); i += Warp::size())
    to[i] = from[i] == 0 ? 0 : from[i] + reinterpret_cast<uint64_t>(&made);
  Warp::sync();
}

// By a warp: the first expert whose home is another in the plan; ~0: there is none.
UEC_DEVICE uint32_t compare_homes(const RankState& known, const DeviceCall& device) {
  constexpr int32_t kAtOnce = 4;
  const auto* const own = reinterpret_cast<const uint32_t*>(known.home.address);
  const auto* const theirs = reinterpret_cast<const uint32_t*>(device.home.address);
  const int32_t last = known.capacity.num_experts - 1;
  uint32_t differs = ~0u;
#pragma unroll 1
  for (int32_t begin = Warp::index(); begin <= last && theirs != nullptr && differs == ~0u;
       begin += kAtOnce * Warp::size()) {
    uint32_t homes[kAtOnce], others[kAtOnce];
#pragma unroll
    for (int32_t k = 0; k < kAtOnce; ++k) {
      homes[k] = ptx::load_global(own + min32(begin + k * Warp::size(), last));
      others[k] = ptx::load_global(theirs + min32(begin + k * Warp::size(), last));
    }
#pragma unroll
    for (int32_t k = kAtOnce - 1; k >= 0; --k)
      if (homes[k] != others[k])
        differs = static_cast<uint32_t>(min32(begin + k * Warp::size(), last));
  }
  return Warp::min_sync(differs);
}

// Why this rank refuses the plan, in the words of a Wait; `seen` is 0 if it does not. By a warp.
UEC_DEVICE_NOINLINE Wait find_refusal(const RankState& known, const DeviceCall& device) {
  Wait wait;
  wait.peer = known.rank;
  const uint32_t differs = compare_homes(known, device);
  if (differs != ~0u) {
    wait.seen = static_cast<uint64_t>(Refusal::kHome);
    wait.expert = static_cast<int32_t>(differs);
    return wait;
  }
  const Topology t = topology_of(known);
  const PlanCheck check = check_plan(Warp{}, t, device.slot_expert);
  wait.seen = static_cast<uint64_t>(check.fault);
  wait.expert = check.expert;
  wait.piece = check.rank * t.slots_per_rank + check.slot;
  return wait;
}

// Finds main weights whose address is missing, once it is known what this rank sends.
UEC_DEVICE_NOINLINE Wait find_missing(const PrepareShared& made, const Capacity& capacity,
                                      int32_t rank) {
  const int32_t num_segments = made.call.tiles.num_segments;
  const int32_t count = made.call.work.num_pieces * num_segments;
  const auto segment_of = [&](int32_t i) { return made.arrays.arrays.segment[i % num_segments]; };
  uint32_t missing = ~0u;
  for (int32_t i = Warp::index(); i < count && missing == ~0u; i += Warp::size()) {
    const Piece& piece = made.call.work.pieces[i / num_segments];
    if (piece.source == Source::kHeld && piece.source_idx >= 0 &&
        made.arrays.arrays.main_ptrs[segment_of(i) * capacity.num_local_experts +
                                     piece.source_idx] == nullptr)
      missing = static_cast<uint32_t>(i);
  }
  missing = Warp::min_sync(missing);
  Wait wait;
  wait.peer = rank;
  if (missing == ~0u) return wait;
  const auto at = static_cast<int32_t>(missing);
  wait.seen = static_cast<uint64_t>(Refusal::kWeights);
  wait.expert = made.call.work.tasks[made.call.work.pieces[at / num_segments].task].expert;
  wait.piece = segment_of(at);
  return wait;
}

template <Operation kOperation>
UEC_DEVICE const auto& arguments_of(const PrepareShared& made) {
  if constexpr (kOperation == Operation::kReduce)
    return made.reduce;
  else
    return made.args;
}

UEC_DEVICE BankTable& bank_of(const RankState& known, int32_t bank) { return known.banks[bank]; }

// By a warp: what a bank's slots hold ahead of a call that transfers `segments`.
UEC_DEVICE_NOINLINE const int32_t* take_residents(const RankState& known, uint64_t segments,
                                                  int32_t bank) {
  BankTable& table = bank_of(known, bank);
  expire_residents(Warp{}, topology_of(known), table.version, segments, table);
  return table.resident;
}

// Whether a bank's slots are filled, as far as they do not hold the plan's experts.
template <Operation kOperation>
UEC_DEVICE bool fills_bank(int32_t bank) {
  return kOperation == Operation::kReplicate && bank >= 0;
}

// By a warp: which of the plan's slots a call takes.
template <Operation kOperation>
UEC_DEVICE auto slots_of(const RankState& known, const DeviceCall& device, int32_t bank) {
  if constexpr (kOperation == Operation::kReduce)
    return SlotsWithTokens{device.slot_quota};
  else
    return SlotsToFill{bank >= 0 ? take_residents(known, device.segments, bank) : nullptr};
}

// By a warp, while another one collects the plan's replicas: the arguments, and the call's tiles.
template <Operation kOperation>
UEC_DEVICE_NOINLINE void take_plan(const RankState& known, const DeviceCall& device,
                                   const LaunchArgs& launch, PrepareShared& made) {
  place_scratch(known.scratch_layout.arrays, made, &made.arrays.arrays);
  if (Warp::leader()) {
    gather_arguments(known, device, launch, made);
    fill_segments(made.tables, arguments_of<kOperation>(made), made.arrays.arrays, &made.call);
  }
}

// By the same, while the other makes the schedule: what does not depend on it.
template <Operation kOperation>
UEC_DEVICE_NOINLINE void digest_plan(const RankState& known, const DeviceCall& device, int32_t bank,
                                     PrepareShared& made) {
  const uint8_t* const* const main_ptrs = device.main_ptrs;
  const Capacity& c = known.capacity;
  const int32_t segments = kOperation == Operation::kReduce ? c.num_grad_segments : c.num_segments;
  for (int32_t i = Warp::index(); i < segments * c.num_local_experts; i += Warp::size())
    made.arrays.arrays.main_ptrs[i] = main_ptrs[i];
  if (fills_bank<kOperation>(bank)) {
    const BankTable& table = bank_of(known, bank);
    if (Warp::leader()) made.args.bank = {bank, table.version, table.resident};
    Warp::sync();
  }
  const Topology& t = made.tables.topology;
  const uint64_t quotas = digest_quotas(Warp{}, t, device.slot_quota, device.home_quota);
  const uint64_t digest = digest_call(Warp{}, t, arguments_of<kOperation>(made), quotas);
  if (Warp::leader()) made.digest = digest;
}

// By a warp, once the plan has been checked: what is particular to groups whose plans may cross
// domains.
UEC_DEVICE_NOINLINE void split_plan(const RankState& known, int32_t bank, PrepareShared& made) {
  ScheduleArrays& work = made.arrays.schedule;
  const SlotsToFill slots{bank >= 0 ? bank_of(known, bank).resident : nullptr};
  const PlanShape shape = split_by_domain(Warp{}, made.tables.topology, made.args.slot_expert,
                                          slots, made.shape, work.scratch, work.schedule);
  if (Warp::leader()) made.shape = shape;
  Warp::sync();
}

// By all threads: makes the call in shared memory, where `made` is. A refusal has its reason in
// `seen`, in all threads of the warp that has found it, and `prepared` is false.
template <Operation kOperation>
UEC_DEVICE_NOINLINE Wait prepare_call(const RankState& known, const DeviceCall& device,
                                      const LaunchArgs& launch, PrepareShared& made,
                                      int32_t& prepared) {
  const int32_t warp = ptx::thread_idx() / ptx::kWarpSize;
  const bool is_last = warp == ptx::num_threads() / ptx::kWarpSize - 1;
  Wait refusal;
  if (is_last) {
    take_plan<kOperation>(known, device, launch, made);
    refusal = find_refusal(known, device);
    if (Warp::leader()) prepared = refusal.seen == 0;
  }
  if (warp == 0) {
    ScheduleArrays& work = made.arrays.schedule;
    place_scratch(known.scratch_layout.schedule, made, &work);
    const PlanShape shape = collect_replicas(Warp{}, topology_of(known), device.slot_expert,
                                             slots_of<kOperation>(known, device, launch.bank),
                                             work.scratch, work.schedule);
    if (Warp::leader()) made.shape = shape;
  }
  ptx::sync_block();
  if (!prepared) return refusal;
  if (is_last) digest_plan<kOperation>(known, device, launch.bank, made);
  if (warp == 0) {
    if (kOperation != Operation::kReduce && known.allow_cross_domain != 0)
      split_plan(known, launch.bank, made);
    const auto& args = arguments_of<kOperation>(made);
    ScheduleArrays& work = made.arrays.schedule;
    choose_mode(Warp{}, made.tables, args, made.shape, made.call.tiles, work);
    fill_worklist(Warp{}, made.tables, args, work, &made.call);
  }
  ptx::sync_block();
  Wait missing;
  if (warp != 0) return missing;
  if (fills_bank<kOperation>(
          launch.bank)) {  // the digest and the schedule are of what was there before
    BankTable& table = bank_of(known, launch.bank);
    publish_residents(known, made.args.slot_expert, table, launch.bank, launch.has_call_number);
    note_residents(Warp{}, topology_of(known), made.args.slot_expert, table);
  }
  if (Warp::leader()) {
    const Mode mode = made.arrays.schedule.schedule.mode;
    const bool pull = kOperation != Operation::kReduce && mode == Mode::kPull;
    take_region(made.call.addresses,
                pull ? static_cast<const uint64_t*>(device.region_at) : nullptr,
                known.capacity.num_ranks);
    made.digest = with_mode(made.digest, arguments_of<kOperation>(made), mode);
  }
  missing = find_missing(made, known.capacity, known.rank);
  if (Warp::leader()) prepared = missing.seen == 0;
  return missing;
}

// By the whole of the first block: makes the call's block, or fails the call and notifies the
// peers. `free_memory` is shared memory that nothing uses yet.
template <class Memory, Operation kOperation>
UEC_DEVICE void make_block(CallShared& shared, const DeviceCall& device, const LaunchArgs& launch,
                           std::byte* free_memory, std::byte* call_block) {
  RankState& state = *shared.block.state;
  auto& made = *reinterpret_cast<PrepareShared*>(free_memory);
  const Wait refusal =
      prepare_call<kOperation>(shared.known, device, launch, made, shared.prepared);
  if (refusal.seen != 0) {
    Memory memory(shared.block);
    reject(shared.block, memory, refusal);
  }
  ptx::sync_block();
  if (!shared.prepared) return;
  const Capacity& capacity = shared.known.capacity;
  const void* const tables_end = shared.known.tables_end;
  if (ptx::thread_idx() / ptx::kWarpSize == 1)
    pack_header(Warp{}, made.call, capacity, tables_end, made.digest, call_block);
  if (ptx::thread_idx() < ptx::kWarpSize)
    pack_arrays(Warp{}, made.call, capacity, tables_end, call_block);
  // Bulk loads, in the async proxy, may put tiles where this was made.
  ptx::fence_proxy_async_shared();
  ptx::sync_block();
  // Release: pairs with await_block() of the rank's other blocks, which read the call's block then.
  if (ptx::thread_idx() == 0)
    ptx::store_release_device(&state.prepared, shared.block.call.epoch.number);
}

// By one thread of another block; false: the rank has failed. Needs no clock: the block that it
// waits for is running.
UEC_DEVICE bool await_block(const RankState& state, uint64_t epoch) {
  while (ptx::load_acquire_device(&state.prepared) != epoch) {
    if (ptx::load_relaxed(&state.failed) != 0) return false;
    ptx::pause();
  }
  return true;
}

// By all threads. Sets shared.prepared and, if so, the header.
template <class Memory, Operation kOperation>
UEC_DEVICE void prepare(CallShared& shared, const DeviceCall& device, const LaunchArgs& launch,
                        std::byte* free_memory, std::byte* call_block) {
  ptx::sync_block();
  if (shared.first)
    make_block<Memory, kOperation>(shared, device, launch, free_memory, call_block);
  else if (ptx::thread_idx() == 0)
    shared.prepared = await_block(*shared.block.state, shared.block.call.epoch.number);
  ptx::sync_block();
  if (!shared.prepared) return;
  for (int32_t i = ptx::thread_idx(); i < kHeaderWords; i += ptx::num_threads())
    put_header(shared, i, reinterpret_cast<const uint64_t*>(call_block)[i]);
  ptx::sync_block();
}

}  // namespace uec::cuda
