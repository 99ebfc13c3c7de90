// The load kernel: from the ids of a rank, or of all ranks of a loopback group, to the table of
// loads on every rank, in one launch.
//
// All blocks of a rank count; the last of them to arrive announces the call, exchanges rows with
// the peers, and leaves the rank as the next call needs it. Only one block of each rank waits for
// peers: loopback needs no more blocks to be resident at the same time.
#pragma once

#include <type_traits>

#include "core/base/digest.hpp"
#include "core/transfer/gather.hpp"
#include "core/transfer/prepare.hpp"
#include "cuda/device/load_block.hpp"
#include "cuda/device/load_count.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/mover.cuh"
#include "cuda/device/wait.cuh"

namespace uec::cuda {

// The warps that exchange rows, a block's last. Each has ranks of its own: loops over ranks share
// them out among all, and members exchange values within their warp only.
struct RowWarps : Warp {
  UEC_DEVICE static int32_t size() {
    return min32(ptx::num_threads(), kLoadTeams * ptx::kWarpSize);
  }
  UEC_DEVICE static int32_t index() { return ptx::thread_idx() - (ptx::num_threads() - size()); }
  template <class T>
  UEC_DEVICE static T read_from(int32_t member, T value) {
    return Warp::read_from(member % ptx::kWarpSize, value);
  }
};

// Far peers have one warp's staging: there a warp has all ranks.
template <bool kFar>
class RowMemory : public DeviceMemory<kFar> {
 public:
  using Team = std::conditional_t<kFar, Warp, RowWarps>;
  using DeviceMemory<kFar>::DeviceMemory;
};

UEC_DEVICE bool is_last_warp() { return ptx::thread_idx() >= ptx::num_threads() - ptx::kWarpSize; }

// Which of them this warp is; -1: it has no ranks.
template <bool kFar>
UEC_DEVICE int32_t row_team(int32_t num_ranks) {
  if constexpr (kFar) return is_last_warp() ? 0 : -1;
  const int32_t first = RowWarps::index() - Warp::index();
  return first >= 0 && first < num_ranks ? first / ptx::kWarpSize : -1;
}

// By one warp, before it is known that the block continues: nothing of this changes before the last
// block leaves.
UEC_DEVICE void begin_load(LoadShared& shared, const LoadBlock& part, RankState& state) {
  const auto* const bases = reinterpret_cast<const uint64_t*>(state.bases.address);
  const auto* const layout = reinterpret_cast<const uint64_t*>(&state.layout);
  constexpr int32_t kWords = sizeof(SymmetricLayout) / sizeof(uint64_t);
  static_assert(sizeof(SymmetricLayout) % sizeof(uint64_t) == 0);
  const auto own = ptx::load_global(bases + state.rank);
  for (int32_t i = Warp::index(); i < max32(kWords, state.num_ranks); i += ptx::kWarpSize) {
    const uint64_t base = i < state.num_ranks ? ptx::load_global(bases + i) : 0;
    const uint64_t word = i < kWords ? ptx::load_global(layout + i) : 0;
    if (i < state.num_ranks) part.bases[i] = base;
    if (i < state.num_ranks) part.involved[i] = 1;
    if (i < kWords) reinterpret_cast<uint64_t*>(&shared.block.call.layout)[i] = word;
  }
  if (!Warp::leader()) return;
  Call& call = shared.block.call;  // without its layout; the rest is not used here
  call.rank = state.rank;
  call.num_ranks = state.num_ranks;
  const uint64_t epoch = state.epoch + 1;
  shared.digest = mix(state.digest, static_cast<uint64_t>(Operation::kGather));
  call.epoch = {epoch, CallRecord::make(epoch, shared.digest, RecordKind::kCall)};
  call.addresses.bases = reinterpret_cast<uint8_t* const*>(part.bases);
  call.addresses.far = state.far;
  call.work.involved = part.involved;
  call.tiles.tile_bytes = 0;  // all stages are the row, of any size
  shared.block.state = &state;
  shared.block.own = reinterpret_cast<uint8_t*>(own);
  shared.block.stop = 0;
  shared.last_call = state.last_call;
  shared.failed = 0;
  for (LoadShared::Team& team : shared.teams) init_ring(team.ring);
}

// By the last warp of the first block, while others count: they may turn out to be bad ids, which a
// record in place of this one says. The last block has to know of it only if it has failed.
template <bool kFar>
UEC_DEVICE void announce_load(BlockCall& block) {
  DeviceMemory<kFar> memory(block);
  if (has_failed(block)) return;  // in an earlier call, whose failure the peers know
  const Report early = check_peers(memory, block.call.layout, block.call.epoch,
                                   CallRecord{block.state->last_record});
  if (early.fault != Fault::kNone) {
    fail(block, memory, early.fault, early.aborter, early.wait);
    return;
  }
  FlagPublisher publisher;
  announce_call(block.call, memory, publisher);
  if constexpr (kFar) far::quiet();  // nothing else that this warp does need wait for signals
}

// By all threads of the last block: takes the rank's row, and leaves zeros for the next call. A
// block-wide barrier follows.
UEC_DEVICE void take_row(const LoadBlock& part, const LoadSums& sums) {
  auto* const counts = reinterpret_cast<uint32_t*>(sums.counts);
  for (int32_t e = ptx::thread_idx(); e < sums.num_experts; e += ptx::num_threads()) {
    part.row[e] = static_cast<int32_t>(ptx::load_global(counts + e));
    counts[e] = 0;
  }
  // Ordinary stores into shared memory, which bulk stores will read.
  ptx::fence_proxy_async_shared();
}

// By one warp: whether neither this rank's ids nor its peers keep it from the exchange.
UEC_DEVICE bool is_clean(const RankState& state) {
  bool clean = true;
  if (Warp::leader()) {
    const int32_t failed = ptx::load_relaxed(&state.failed);
    clean = ptx::load_global(&state.bad_id) == 0 && failed == 0;
  }
  return Warp::broadcast(clean);
}

UEC_DEVICE int64_t id_at(const LoadCall& call, uint64_t position) {
  if (call.id_bytes != 8) return reinterpret_cast<const int32_t*>(call.ids)[position];
  return reinterpret_cast<const int64_t*>(call.ids)[position];
}

// This rank's own ids are bad: nothing of them goes to any table, and the peers are notified at
// once.
template <class Memory>
UEC_ROLE void reject_ids(BlockCall& block, Memory& memory, const LoadCall& ids) {
  const RankState& state = *block.state;
  if (Warp::leader()) {  // before the report, which publish_failure() publishes
    Status* const status = state.status;
    const uint64_t position = bad_id_word(state.bad_id);
    const auto at = static_cast<int64_t>(position);
    status->bad_position = ids.id_bytes == 0 ? -2 - at : at;
    status->bad_id = id_at(ids, position);
  }
  Wait wait;
  wait.peer = state.rank;
  reject(block, memory, wait);
}

// By a warp with ranks. True: the table has the rows of these, for all threads that synchronise
// with this warp.
template <bool kFar>
UEC_ROLE bool exchange_rows(LoadShared& shared, const LoadBlock& part, int32_t num_experts,
                            int32_t team, bool is_clean, const LoadCall& ids) {
  BlockCall& block = shared.block;
  DeviceMemory<kFar> all(block);  // a failure concerns all ranks
  if (!is_clean) {
    if (has_failed(block)) return false;  // the peers know of that failure
    if (team == 0) reject_ids(block, all, ids);
    return false;
  }
  RowMemory<kFar> memory(block);
  DeviceMover<kFar> mover(shared.teams[team].ring, reinterpret_cast<uint8_t*>(part.row), block);
  Gather gather(block.call, memory, mover, nullptr, num_experts, part.sent);
  if (drive(gather, block, shared.teams[team].clock, all)) return true;
  while (gather.drain_step() != Step::kFinished) ptx::pause();
  return false;
}

// By all threads: a warp takes chunks whose words its lanes have in flight together, at constant
// offsets.
template <class T>
UEC_DEVICE void copy_words(T* to, const T* from, int32_t count) {
  constexpr int32_t kChunk = kTableQuadsAtOnce * ptx::kWarpSize;
  const int32_t first = ptx::thread_idx() - Warp::index();
  const int32_t chunks_end = count / kChunk * kChunk;
#pragma unroll 1
  for (int32_t at = first * kTableQuadsAtOnce; at < chunks_end;
       at += ptx::num_threads() * kTableQuadsAtOnce) {
    const T* const own = from + at + Warp::index();
    T* const out = to + at + Warp::index();
    T words[kTableQuadsAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kTableQuadsAtOnce; ++i) words[i] = own[i * ptx::kWarpSize];
#pragma unroll
    for (int32_t i = 0; i < kTableQuadsAtOnce; ++i) out[i * ptx::kWarpSize] = words[i];
  }
#pragma unroll 1
  for (int32_t at = chunks_end + ptx::thread_idx(); at < count; at += ptx::num_threads())
    to[at] = from[at];
}

UEC_DEVICE void copy_table(const BlockCall& block, int32_t num_experts, int32_t* load) {
  const int32_t entries = block.call.num_ranks * num_experts;
  const uint8_t* const from = block.own + block.call.layout.load(0, num_experts);
  const int32_t num_quads = reinterpret_cast<uint64_t>(load) % 16 == 0 ? entries / 4 : 0;
  copy_words(reinterpret_cast<uint4*>(load), reinterpret_cast<const uint4*>(from), num_quads);
  copy_words(reinterpret_cast<uint32_t*>(load) + 4 * num_quads,
             reinterpret_cast<const uint32_t*>(from) + 4 * num_quads, entries - 4 * num_quads);
}

UEC_DEVICE void clear_table(const BlockCall& block, int32_t num_experts, int32_t* load) {
  const int32_t count = block.call.num_ranks * num_experts;
  for (int32_t i = ptx::thread_idx(); i < count; i += ptx::num_threads()) load[i] = 0;
}

// By one warp. The next launch finds everything as this one did, except for the epoch.
template <bool kFar>
UEC_ROLE void finish_load(LoadShared& shared, bool done, bool has_call_number) {
  BlockCall& block = shared.block;
  RankState& state = *block.state;
  if (!done) {
    DeviceMemory<kFar> memory(block);
    if (!has_failed(block)) fail(block, memory, Fault::kCancelled, -1, Wait{});
    ptx::sync_warp();
    if (Warp::leader() && !state.failure_published) publish_failure(state);
  }
  if (!Warp::leader()) return;
  if (done) {
    state.digest = shared.digest;
    state.last_record = block.call.epoch.record.word;
    state.epoch = block.call.epoch.number;
    state.last_call = shared.last_call + has_call_number;
  }
  state.bad_id = 0;
  state.left = 0;
}

// The outcome, for the threads of a block.
enum class LoadEnd { kElsewhere, kGathered, kFailed };  // kElsewhere: another block continues

template <bool kFar>
UEC_DEVICE LoadEnd load(const LoadArgs& args, std::byte* shared_memory) {
  auto& shared = *reinterpret_cast<LoadShared*>(shared_memory);
  RankState& state = args.states[ptx::block_y()];
  const LoadCall& own = args.calls[ptx::block_y()];
  // The lines of the state arrive together: each would otherwise be a trip of its own. Not of what
  // another block may change meanwhile.
  constexpr int32_t kLine = 128, kLines = ceil_div(offsetof(RankState, prepared), kLine);
  if (ptx::thread_idx() < kLines)
    ptx::load_global(reinterpret_cast<const uint32_t*>(&state) + ptx::thread_idx() * (kLine / 4));
  const int32_t num_ranks = state.num_ranks, num_experts = state.capacity.num_experts;
  LoadBlock part;
  LoadBlock::cut(shared_memory + kLoadHeadBytes, num_ranks, num_experts, &part);
  const LoadSums sums{state.counts, &state.bad_id, num_experts};
  count_ids(own, sums, part.row, [&] {
    if (!is_last_warp()) return;
    begin_load(shared, part, state);
    ptx::sync_warp();  // its members have set parts of it
    if (ptx::block_x() == 0) announce_load<kFar>(shared.block);
  });
  // Acquire-release: what all blocks have counted, and how the first has failed, come before what
  // the last one does.
  ptx::sync_block();
  if (ptx::thread_idx() == 0)
    shared.last = ptx::fetch_add_acq_rel(&state.left, 1) == ptx::num_blocks_x() - 1;
  ptx::sync_block();
  if (!shared.last) return LoadEnd::kElsewhere;
  const int32_t team = row_team<kFar>(num_ranks);
  const bool clean = team >= 0 && is_clean(state);
  take_row(part, sums);
  ptx::sync_block();

  if (team >= 0 && !exchange_rows<kFar>(shared, part, num_experts, team, clean, own) &&
      Warp::leader())
    ptx::store_shared_relaxed(&shared.failed, 1);
  // A call that never has to wait learns of its cancellation here. By another warp where there is
  // one, because host memory is far away.
  const int32_t warp = ptx::thread_idx() / ptx::kWarpSize;
  if (warp == 0) {
    const bool cancelled = is_cancelled(shared.block);
    if (Warp::leader()) shared.cancelled = cancelled;
  }
  ptx::sync_block();
  const bool done = !shared.failed && !shared.cancelled;
  // Copied before this launch ends: peers write the table again once the next call has been
  // announced.
  if (done)
    copy_table(shared.block, num_experts, own.load);
  else  // a planner of it does nothing
    clear_table(shared.block, num_experts, own.load);
  if (is_last_warp()) finish_load<kFar>(shared, done, args.has_call_number != 0);
  return done ? LoadEnd::kGathered : LoadEnd::kFailed;
}

}  // namespace uec::cuda
