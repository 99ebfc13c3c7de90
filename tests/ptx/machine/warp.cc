// A warp's instructions in turn: lanes that are at the same place go on together, and wait for each
// other where an instruction says so.
#include <algorithm>

#include "machine.hpp"

namespace ptx_machine {
namespace {

constexpr uint32_t kMaxDepth = 100;  // of calls
constexpr uint64_t kCallCycles = 20, kAsyncCycles = 4, kProxyFenceCycles = 12;
constexpr uint64_t kIdleSteps = 200'000, kStepNs = 20, kIdleStepNs = 5000;

uint64_t reduce(Atomic operation, bool is_signed, uint64_t a, uint64_t b) {
  const bool less = is_signed ? static_cast<int32_t>(a) < static_cast<int32_t>(b) : a < b;
  switch (operation) {
    case kAtomicAdd:
      return a + b;
    case kAtomicMin:
      return less ? a : b;
    case kAtomicMax:
      return less ? b : a;
    case kAtomicAnd:
      return a & b;
    case kAtomicOr:
      return a | b;
    default:
      return a ^ b;
  }
}

}  // namespace

// Returns whether the warp has moved.
bool Machine::run(Warp& w, int budget) {
  if (w.live == 0) return true;
  bool moved = false;
  uint32_t ready = 0;
  each_lane(w.live, [&](int l) {
    const bool continues =
        (w.status[l] == Status::kAtBulk && random(8) == 0 && finish_bulk_wait(w, l)) ||
        (w.status[l] == Status::kAtCluster && pass_cluster(w, l)) ||
        (w.status[l] == Status::kAtQuiet && is_quiet(w, l));
    if (continues) {
      w.status[l] = Status::kRuns;
      ++w.pc[l];
      moved = true;
    }
    if (w.status[l] == Status::kRuns) ready |= 1u << l;
  });
  if (ready == 0) return moved;
  if (w.naps > 0) {
    --w.naps;
    return true;
  }
  // Those who are behind go first, so that they meet the others; now and then any.
  int leader = std::countr_zero(ready);
  if (!options_.timed() && random(16) == 0) {
    do leader = static_cast<int>(random(32));
    while ((ready >> leader & 1) == 0);
  } else {
    each_lane(ready, [&](int l) {
      if (w.depth[l] > w.depth[leader] || (w.depth[l] == w.depth[leader] && w.pc[l] < w.pc[leader]))
        leader = l;
    });
  }
  Frame* const f = w.frame[leader];
  uint32_t pc = w.pc[leader], lanes = 0, others = 0, meets = ~0u;
  each_lane(ready, [&](int l) {
    if (w.pc[l] == pc && w.frame[l] == f) {
      lanes |= 1u << l;
      return;
    }
    others |= 1u << l;
    if (w.frame[l] == f && w.pc[l] > pc) meets = std::min(meets, w.pc[l]);
  });
  const bool timed = options_.timed();
  const auto set_pc = [&](uint32_t of, uint32_t to) {
    each_lane(of, [&](int l) { w.pc[l] = to; });
  };

  for (; budget > 0 && pc != meets; --budget) {
    const Instruction& i = module_.code[pc];
    if (timed && !has_operands(w, *f, i)) break;
    ++steps_;
    // Where all wait, time flies: a wait that expires does not take millions of steps.
    elapsed_ns_ += steps_ - changed_at_ < kIdleSteps ? kStepNs : kIdleStepNs;
    uint32_t on = lanes;
    if (i.predicate >= 0) on &= i.unless ? ~f->predicates[i.predicate] : f->predicates[i.predicate];
    ++w.instructions;
    w.lane_instructions += std::popcount(on);
    const uint64_t at = timed ? issue(w, i) : 0;
    if (on == 0) {
      ++pc;
      continue;
    }
    switch (i.op) {
      case Op::kLoad:
        load(w, *f, i, on, pc, at);
        break;
      case Op::kStore:
        store(w, *f, i, on, pc, at);
        break;
      case Op::kAtomic:
      case Op::kReduce:
        atomic(w, *f, i, on, pc, at);
        break;
      case Op::kFence:
        fence(w, i, on);
        break;
      case Op::kProxyFence:
        if (timed)
          w.now += kProxyFenceCycles;
        else
          each_lane(on, [&](int l) { proxy_fence(w, l, i.space); });
        if (i.space != Space::kGlobal) fence_mbarriers(w, on);
        break;
      case Op::kMbarrierFence:
        fence_mbarriers(w, on);
        break;
      case Op::kMbarrierInit:
      case Op::kMbarrierArrive:
      case Op::kMbarrierExpect:
      case Op::kMbarrierTest:
        mbarrier(w, *f, i, on, pc);
        break;
      case Op::kBulkLoad:
      case Op::kBulkStore:
      case Op::kBulkCopyShared:
        bulk(w, i, on, pc, at);
        break;
      case Op::kBulkCommit:
        each_lane(on,
                  [&](int l) { w.lanes[l].groups.push_back(std::exchange(w.lanes[l].open, {})); });
        if (timed) w.now += kAsyncCycles;
        break;
      case Op::kBulkWait:
        if (bulk_wait(w, i, on, pc)) break;
        each_lane(lanes, [&](int l) {
          if (w.status[l] == Status::kRuns) w.pc[l] = pc + 1;
        });
        return true;
      case Op::kSleep:
        if (timed) {
          const uint64_t ns = value(w, std::countr_zero(on), i.from_operand[0], pc);
          w.now += random(static_cast<uint32_t>(2 * ns) + 1) * costs_.mhz / 1000;
          break;
        }
        w.naps = random(4);
        set_pc(lanes, pc + 1);
        return true;
      case Op::kWarpBarrier:
      case Op::kShuffle:
      case Op::kRedux:
      case Op::kVote:
      case Op::kMatch: {
        uint32_t mask = 0;
        bool same = true;
        each_lane(on, [&](int l) {
          const auto own = static_cast<uint32_t>(value(w, l, i.from_operand[i.num_from - 1], pc));
          if ((own >> l & 1) == 0)
            trap("a mask without the lane that has it: " + who(w, l) + ", " + where(pc));
          same &= mask == 0 || own == mask;
          mask = w.sync_mask[l] = own;
        });
        if (same && (mask & w.live) == on) {
          synchronise(w, on, pc);
          if (timed && i.op == Op::kWarpBarrier) w.now += kAsyncCycles;
          if (timed && i.op != Op::kWarpBarrier) result(*f, i, at + latency(i), kWaitAlu);
          break;
        }
        set_pc(lanes, pc + 1);
        set_pc(on, pc);
        each_lane(on, [&](int l) { w.status[l] = Status::kAtWarp; });
        meet_in_warp(w);
        if (timed) w.now += costs_.shuffle;
        return true;
      }
      case Op::kBlockBarrier:
        set_pc(lanes, pc + 1);
        each_lane(on, [&](int l) { w.status[l] = Status::kAtBlock; });
        w.block->at_barrier += std::popcount(on);
        w.block->barrier_at = std::max(w.block->barrier_at, w.now);
        meet_in_block(*w.block, w);
        return true;
      case Op::kClusterArrive:
        arrive_at_cluster(w, i, on);
        break;
      case Op::kClusterWait:
        set_pc(lanes, pc + 1);
        set_pc(on, pc);
        each_lane(on, [&](int l) {
          // Nobody wakes those who come when the phase has ended already.
          if (timed && pass_cluster(w, l))
            w.pc[l] = pc + 1;
          else
            w.status[l] = Status::kAtCluster;
        });
        return true;
      case Op::kCall:
        set_pc(lanes, pc + 1);
        call(w, *f, i, on, pc);
        return true;
      case Op::kReturn:
      case Op::kExit:
        set_pc(lanes, pc + 1);
        leave(w, *f, i, on);
        return true;
      case Op::kBranch:
        if (timed) w.now += costs_.branch;
        if (on == lanes) {
          pc = static_cast<uint32_t>(i.target);
          if (others == 0) continue;
          set_pc(lanes, pc);
          return true;
        }
        set_pc(lanes, pc + 1);
        set_pc(on, static_cast<uint32_t>(i.target));
        return true;
      case Op::kTrap:
        trap("the kernel's own: " + where(pc));
      default:
        compute(w, *f, i, on, pc);
        if (timed) result(*f, i, at + latency(i), kWaitAlu);
    }
    ++pc;
  }
  set_pc(lanes, pc);
  return true;
}

// ---- lanes of a warp ----------------------------------------------------------------------------

void Machine::synchronise(Warp& w, uint32_t lanes, uint32_t pc) {
  const Instruction& i = module_.code[pc];
  if (i.op == Op::kWarpBarrier) {
    each_lane(lanes, [&](int l) { retire_all(w, l); });
    return join_lanes(w, lanes);
  }
  if (i.op == Op::kShuffle) return shuffle(w, lanes, pc);
  if (i.op == Op::kCall) {
    Frame& f = *w.frame[std::countr_zero(lanes)];
    return (this->*network_function(i.callee)->run)({w, f, i, lanes, pc});
  }
  const uint64_t type = mask_of(bytes_of(i.type));
  uint64_t in[32];
  each_lane(lanes, [&](int l) { in[l] = value(w, l, i.from_operand[0], pc); });
  uint64_t all = 0;
  if (i.op == Op::kRedux) {
    const int first = std::countr_zero(lanes);
    all = in[first] & type;
    each_lane(lanes & (lanes - 1), [&](int l) {
      all = reduce(static_cast<Atomic>(i.mode), is_signed(i.type), all, in[l] & type) & type;
    });
  } else if (i.op == Op::kVote) {
    uint32_t bits = 0;
    each_lane(lanes, [&](int l) { bits |= static_cast<uint32_t>(in[l] & 1) << l; });
    all = i.mode == kBallot ? bits
          : i.mode == kAny  ? bits != 0
          : i.mode == kAll  ? bits == lanes
                            : bits == 0 || bits == lanes;
  }
  each_lane(lanes, [&](int l) {
    if (i.op == Op::kMatch) {
      all = 0;
      each_lane(lanes, [&](int k) { all |= uint64_t{(in[k] & type) == (in[l] & type)} << k; });
    }
    put(*w.frame[l], l, i.to[0], all);
  });
}

void Machine::shuffle(Warp& w, uint32_t lanes, uint32_t pc) {
  const Instruction& i = module_.code[pc];
  uint64_t in[32];
  each_lane(lanes, [&](int l) { in[l] = value(w, l, i.from_operand[0], pc); });
  each_lane(lanes, [&](int l) {
    const int by = static_cast<int>(value(w, l, i.from_operand[1], pc) & 31);
    const auto clamp = static_cast<uint32_t>(value(w, l, i.from_operand[2], pc));
    const int segment = static_cast<int>(clamp >> 8 & 31), limit = static_cast<int>(clamp & 31);
    const int low = l & segment, high = low | (limit & ~segment);
    int source = l;
    bool inside = false;
    switch (i.mode) {
      case kShuffleIndex:
        source = low | (by & ~segment);
        inside = source <= high;
        break;
      case kShuffleUp:
        source = l - by;
        inside = source >= high;
        break;
      case kShuffleDown:
        source = l + by;
        inside = source <= high;
        break;
      default:
        source = l ^ by;
        inside = source <= high;
    }
    if (!inside) source = l;
    if ((lanes >> source & 1) == 0) {
      violate("a shuffle from a lane that does not take part: " + where(pc));
      source = l;
    }
    put(*w.frame[l], l, i.to[0], in[source] & mask_of(4));
    if (i.num_to > 1) put(*w.frame[l], l, i.to[1], inside);
  });
}

// Lanes that came at different times, and are all there now.
void Machine::meet_in_warp(Warp& w) {
  each_lane(w.live, [&](int l) {
    if (w.status[l] != Status::kAtWarp) return;
    const uint32_t set = w.sync_mask[l] & w.live;
    bool all = true;
    each_lane(set, [&](int k) {
      all &= w.status[k] == Status::kAtWarp && w.sync_mask[k] == w.sync_mask[l];
    });
    if (!all) return;
    const Op op = module_.code[w.pc[l]].op;
    each_lane(set, [&](int k) {
      // Barriers of any place meet; what exchanges values does so at one place.
      const bool fits =
          op == Op::kWarpBarrier ? module_.code[w.pc[k]].op == op : w.pc[k] == w.pc[l];
      if (!fits)
        trap("lanes of a warp wait for each other at different instructions: " + where(w.pc[l]) +
             " and " + where(w.pc[k]) + "\n" + state());
    });
    synchronise(w, set, w.pc[l]);
    each_lane(set, [&](int k) {
      ++w.pc[k];
      w.status[k] = Status::kRuns;
    });
  });
}

// ---- blocks and clusters ------------------------------------------------------------------------

void Machine::exit_lane(Warp& w, int lane) {
  retire_all(w, lane);
  w.status[lane] = Status::kExited;
  w.live &= ~(1u << lane);
  --w.block->live_lanes;
}

void Machine::meet_in_block(Block& block, Warp& current) {
  if (block.at_barrier == 0 || block.at_barrier != block.live_lanes) return;
  block.at_barrier = 0;
  for (const auto& w : block.warps) each_lane(w->live, [&](int l) { retire_all(*w, l); });
  join_block(block);
  const uint64_t at = std::exchange(block.barrier_at, 0) + costs_.barrier;
  for (const auto& w : block.warps) {
    if (w->live == 0) continue;
    each_lane(w->live, [&](int l) { w->status[l] = Status::kRuns; });
    if (!options_.timed()) continue;
    wait_until(*w, at, kWaitBarrier);
    if (w.get() != &current) turns_.push({.at = w->now, .number = w->index, .warp = w.get()});
  }
}

void Machine::arrive_at_cluster(Warp& w, const Instruction& i, uint32_t lanes) {
  Block& block = *w.block;
  Cluster& cluster = *block.cluster;
  each_lane(lanes, [&](int l) {
    retire_all(w, l);
    uint64_t& phase = block.cluster_phase[w.in_block * 32 + l];
    if (phase > cluster.phase) trap("two arrivals at a cluster's barrier: " + who(w, l));
    phase = cluster.phase + 1;
    if (!options_.timed() && i.order != Order::kRelaxed) {
      const KnownPtr mine = publish(w, l);
      KnownPtr sum = cluster.arriving ? cluster.arriving.copy() : mine;
      if (cluster.arriving) sum->add(*mine);
      cluster.arriving = sum;
    }
    cluster.at = std::max(cluster.at, w.now + costs_.cluster);
    ++cluster.arrived;
  });
  uint32_t all = 0;
  for (const Block* const b : cluster.blocks)
    all += b->warps.empty() ? b->grid->threads : b->live_lanes;
  if (cluster.arrived < all) return;
  cluster.arrived = 0;
  ++cluster.phase;
  cluster.last = std::exchange(cluster.arriving, {});
  for (Block* const b : cluster.blocks)
    for (const auto& other : b->warps) {
      bool waits = false;
      each_lane(other->live, [&](int l) { waits |= other->status[l] == Status::kAtCluster; });
      if (!waits || !options_.timed() || other.get() == &w) continue;
      turns_.push(
          {.at = std::max(other->now, cluster.at), .number = other->index, .warp = other.get()});
    }
}

bool Machine::pass_cluster(Warp& w, int lane) {
  Cluster& cluster = *w.block->cluster;
  if (w.block->cluster_phase[w.in_block * 32 + lane] > cluster.phase) return false;
  if (!options_.timed()) join(w, lane, cluster.last, true);
  wait_until(w, cluster.at, kWaitBarrier);
  return true;
}

// ---- calls --------------------------------------------------------------------------------------

void Machine::call(Warp& w, Frame& f, const Instruction& i, uint32_t lanes, uint32_t pc) {
  if (const NetworkFunction* const modelled = network_function(i.callee)) {
    if (options_.timed()) trap("NVSHMEM's functions have no costs: " + i.callee);
    if (!modelled->of_warp || lanes == w.live) return (this->*modelled->run)({w, f, i, lanes, pc});
    each_lane(lanes, [&](int l) {
      w.pc[l] = pc;
      w.sync_mask[l] = ~0u;
      w.status[l] = Status::kAtWarp;
    });
    return meet_in_warp(w);
  }
  if (i.target < 0 || !module_.functions[i.target].has_body)
    trap("a function that is not modelled: " + i.callee + ", at " + where(pc));
  const Function& g = module_.functions[i.target];
  const uint32_t depth = w.depth[std::countr_zero(lanes)] + 1u;
  if (depth > kMaxDepth) trap("calls without end: " + where(pc));
  Frame& inner = *frame(w, depth, g);
  each_lane(lanes, [&](int l) {
    for (size_t k = 0; k < g.formals.size(); ++k)
      std::memcpy(inner.area.data() + l * inner.area_stride + g.formals[k].first,
                  f.area.data() + l * f.area_stride + i.args[k], g.formals[k].second);
    w.lanes[l].stack.push_back({pc + 1, &f});
    w.frame[l] = &inner;
    ++w.depth[l];
    w.pc[l] = static_cast<uint32_t>(g.begin);
  });
  if (!options_.timed()) return;
  inner.began = w.now;
  inner.instructions = w.instructions;
  w.now += kCallCycles;
  std::fill(inner.ready.begin(), inner.ready.end(), Frame::Ready{});
}

void Machine::leave(Warp& w, Frame& f, const Instruction& i, uint32_t lanes) {
  each_lane(lanes, [&](int l) {
    Lane& lane = w.lanes[l];
    if (lane.stack.empty() || i.op == Op::kExit) return exit_lane(w, l);
    const auto [back, caller] = lane.stack.back();
    lane.stack.pop_back();
    const Instruction& call = module_.code[back - 1];
    if (call.returns_at >= 0)
      std::memcpy(caller->area.data() + l * caller->area_stride + call.returns_at,
                  f.area.data() + l * f.area_stride + f.function->returns_at,
                  f.function->returned_bytes);
    w.frame[l] = caller;
    w.pc[l] = back;
    --w.depth[l];
  });
  if (options_.timed()) {
    w.now += kCallCycles;
    Calls& calls = calls_[f.function->name];
    ++calls.times;
    calls.cycles += w.now - f.began;
    calls.instructions += w.instructions - f.instructions;
  }
  meet_in_warp(w);
  meet_in_block(*w.block, w);
}

}  // namespace ptx_machine
