// What instructions cost: a warp has a clock, waits for what it needs, and takes one of the four
// issue slots of its multiprocessor. Blocks have a multiprocessor each.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "machine.hpp"

namespace ptx_machine {
namespace {

constexpr uint64_t kDivide64 = 70, kDivide32 = 22;  // issue slots; PTX has one instruction for them

}  // namespace

Costs Costs::read(const std::string& path) {
  Costs costs;
  const std::map<std::string, int64_t*> names{{"MHZ", &costs.mhz},
                                              {"ALU", &costs.alu},
                                              {"BRANCH", &costs.branch},
                                              {"SHUFFLE", &costs.shuffle},
                                              {"BARRIER", &costs.barrier},
                                              {"SHARED", &costs.shared},
                                              {"L1", &costs.l1},
                                              {"L2", &costs.l2},
                                              {"REMOTE", &costs.remote},
                                              {"HOST", &costs.host},
                                              {"FENCE_DEVICE", &costs.fence_device},
                                              {"FENCE_SYSTEM", &costs.fence_system},
                                              {"ATOMIC", &costs.atomic},
                                              {"BULK", &costs.bulk},
                                              {"BULK_BYTES", &costs.bulk_bytes},
                                              {"LINK_BYTES", &costs.link_bytes},
                                              {"CLUSTER", &costs.cluster}};
  std::ifstream in(path);
  const auto fail = [&](const std::string& what) {
    std::fprintf(stderr, "%s: %s\n", path.c_str(), what.c_str());
    std::exit(2);
  };
  if (!in) fail("cannot be read");
  for (std::string line; std::getline(in, line);) {
    line = line.substr(0, line.find('#'));
    while (!line.empty() && line.back() == ' ') line.pop_back();
    if (line.empty()) continue;
    const size_t equals = line.find('=');
    const auto it = names.find(line.substr(0, equals));
    char* end = nullptr;
    const int64_t value =
        equals == std::string::npos ? 0 : std::strtoll(line.c_str() + equals + 1, &end, 10);
    if (it == names.end() || value <= 0 || *end != 0) fail("not NAME=CYCLES: " + line);
    *it->second = value;
  }
  return costs;
}

uint64_t Machine::latency(const Instruction& i) const {
  const bool wide = bytes_of(i.type) == 8;
  switch (i.op) {
    case Op::kDiv:
    case Op::kRem:
      return wide ? 300 : 110;
    case Op::kShuffle:
    case Op::kMatch:
      return costs_.shuffle;
    case Op::kRedux:
      return costs_.shuffle * 3 / 4;
    case Op::kVote:
      return costs_.shuffle / 2;
    case Op::kMov:
      return i.from_operand[0].kind == Kind::kSpecial ? 20 : costs_.alu;
    case Op::kMovVector:
    case Op::kConvert:
    case Op::kConvertAddress:
    case Op::kSelect:
    case Op::kBitInsert:
    case Op::kMulWide:
    case Op::kMadWide:
      return costs_.alu;
    default:
      return costs_.alu * (wide ? 2 : 1);
  }
}

// Whether what an instruction needs is there. If not, waits for it: until then the issue slot is
// for other warps.
bool Machine::has_operands(Warp& w, Frame& f, const Instruction& i) {
  Frame::Ready last;
  const auto need = [&](const Operand& o) {
    if (o.kind != Kind::kRegister && o.kind != Kind::kPredicate) return;
    if (const Frame::Ready& r = f.ready_of(o); r.at > last.at) last = r;
  };
  for (int k = 0; k < i.num_from; ++k) need(i.from_operand[k]);
  for (int k = 0; k < i.num_to; ++k) need(i.to[k]);
  if (i.has_address) need(i.base);
  if (i.predicate >= 0) {
    Operand predicate;
    predicate.kind = Kind::kPredicate;
    predicate.index = i.predicate;
    need(predicate);
  }
  if (last.at <= w.now) return true;
  w.current = last.pc;  // charged to who made it late
  wait_until(w, last.at, last.wait);
  return false;
}

// Waits for an issue slot. Returns when the instruction is issued.
uint64_t Machine::issue(Warp& w, const Instruction& i) {
  const auto pc = static_cast<uint32_t>(&i - module_.code.data());
  w.current = pc;
  uint64_t& slot = w.block->slots[w.in_block % 4];
  const uint64_t at = std::max(w.now, slot);
  w.slot_wait += at - w.now;
  const bool wide = bytes_of(i.type) == 8;
  uint64_t slots = 1;
  if (i.op == Op::kDiv || i.op == Op::kRem)
    slots = wide ? kDivide64 : kDivide32;
  else if (wide && i.op != Op::kLoad && i.op != Op::kStore && i.op != Op::kMov)
    slots = 2;  // of 32 bits each
  slot = at + slots;
  auto& [cycles, times] = w.by_pc[pc];
  cycles += slot - w.now;
  ++times;
  w.now = slot;
  return at;
}

void Machine::result(Frame& f, const Instruction& i, uint64_t at, Wait wait) {
  const auto pc = static_cast<uint32_t>(&i - module_.code.data());
  for (int k = 0; k < i.num_to; ++k)
    if (i.to[k].kind == Kind::kRegister || i.to[k].kind == Kind::kPredicate)
      f.ready_of(i.to[k]) = {at, pc, wait};
}

void Machine::wait_until(Warp& w, uint64_t at, Wait wait) {
  if (at <= w.now) return;
  const uint64_t cycles = at - w.now;
  w.by_pc[w.current].first += cycles;
  w.waited[wait] += cycles;
  if (cycles >= kTrip) ++w.trips[wait];
  w.now = at;
}

// A fence, or a release: this thread's stores have arrived.
void Machine::wait_for_stores(Warp& w, Scope scope) {
  wait_until(w, w.stores_done, w.stores_wait);
  const int64_t cycles = scope == Scope::kSystem    ? costs_.fence_system
                         : scope == Scope::kDevice  ? costs_.fence_device
                         : scope == Scope::kCluster ? costs_.cluster
                                                    : 0;
  wait_until(w, w.now + cycles, kWaitFence);
}

// ---- where memory is ----------------------------------------------------------------------------

constexpr int32_t kNobody = -2, kHost = -1;

int32_t Machine::owner_of(uint64_t address) const {
  auto it = memory_.upper_bound(address);
  if (it == memory_.begin()) return kNobody;
  --it;
  return address < it->first + it->second.first ? it->second.second : kNobody;
}

Wait Machine::place_of(const Block& block, uint64_t address) const {
  const int32_t owner = owner_of(address);
  if (owner == kHost) return kWaitHost;
  return owner == kNobody || owner == block.rank ? kWaitL2 : kWaitRemote;
}

// Bytes to or from a peer pass one rank's link on their way out, and the other's on their way in:
// the switch between them holds up nobody. Returns when the last has. A link's clock counts bytes,
// of which a cycle has `link_bytes`: a lane's load takes less than a cycle, a warp's does not.
uint64_t Machine::over_link(const Block& block, uint64_t address, uint32_t bytes, bool inwards,
                            uint64_t at) {
  const int32_t peer = owner_of(address);
  const auto of_cycle = static_cast<uint64_t>(costs_.link_bytes);
  uint64_t& out = link_free_[{inwards ? peer : block.rank, true}];
  uint64_t& in = link_free_[{inwards ? block.rank : peer, false}];
  const uint64_t begin = std::max(at * of_cycle, out);
  out = begin + bytes;
  in = std::max(begin, in) + bytes;
  return in / of_cycle;
}

void Machine::apply_events() {
  while (!events_.empty() && events_.top().at <= now_) {
    const Due due = events_.top();
    events_.pop();
    if (due.copy == nullptr) {
      std::memcpy(reinterpret_cast<void*>(due.address), &due.value, due.bytes);
    } else if (due.arrives) {
      complete(*due.copy);
      remove_flying(*due.copy);
    } else {
      while (!due.copy->read) read_some(*due.copy, true);
    }
  }
}

// ---- counts -------------------------------------------------------------------------------------

std::string Machine::report_of(const Grid& grid) const {
  const auto us = [&](uint64_t cycles) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3f", costs_.nanoseconds(cycles) / 1000);
    return std::string(text);
  };
  const auto number = [](uint64_t n) { return std::to_string(n); };
  const Warp* last = nullptr;
  const Warp* first = nullptr;
  uint64_t instructions = 0, lanes = 0, warps = 0, most = 0, begin = ~uint64_t{0}, end = 0;
  for (const auto& block : grid.blocks)
    for (const auto& w : block->warps) {
      instructions += w->instructions;
      lanes += w->lane_instructions;
      most = std::max(most, w->instructions);
      ++warps;
      begin = std::min(begin, w->began);
      end = std::max(end, w->now);
      if (first == nullptr) first = w.get();
      if (last == nullptr || w->now > last->now) last = w.get();
    }
  const auto warp = [&](const Warp& w) {
    std::string text = "{\"us\": " + us(w.now - w.began) +
                       ", \"instructions\": " + number(w.instructions) +
                       ", \"slots_us\": " + us(w.slot_wait);
    std::string waits, trips;
    for (int k = 0; k < kWaits; ++k) {
      const std::string name = std::string(k == 0 ? "\"" : ", \"") + kWaitNames[k] + "\": ";
      waits += name + us(w.waited[k]);
      trips += name + number(w.trips[k]);
    }
    text += ", \"waits_us\": {" + waits + "}, \"trips\": {" + trips + "}, \"places\": [";
    // Where its time went, most first.
    std::map<std::string, std::pair<uint64_t, uint64_t>> places;
    for (const auto& [pc, count] : w.by_pc) {
      std::string place = where(pc);
      const size_t line = place.find(" ptx:");
      place.erase(line, place.find(' ', line + 1) - line);
      places[place].first += count.first;
      places[place].second += count.second;
    }
    std::vector<std::pair<uint64_t, std::string>> sorted;
    for (const auto& [place, count] : places)
      sorted.push_back({count.first, "[\"" + place + "\", " + us(count.first) + ", " +
                                         number(count.second) + "]"});
    std::sort(sorted.rbegin(), sorted.rend());
    if (sorted.size() > 40) sorted.resize(40);
    for (size_t k = 0; k < sorted.size(); ++k) text += (k == 0 ? "" : ", ") + sorted[k].second;
    return text + "]}";
  };
  std::string atomics;
  for (const auto& [place, count] : atomics_)
    atomics += std::string(atomics.empty() ? "" : ", ") + "{\"at\": \"" + where(place.first) +
               place.second + "\", \"times\": " + number(count.times) +
               ", \"from_us\": " + us(count.first) + ", \"to_us\": " + us(count.last) + "}";
  std::string calls;
  for (const auto& [name, c] : calls_)
    calls += std::string(calls.empty() ? "" : ", ") + "{\"function\": \"" + name +
             "\", \"times\": " + number(c.times) + ", \"us\": " + us(c.cycles) +
             ", \"instructions\": " + number(c.instructions) + "}";
  return "{\"kernel\": \"" + grid.kernel + "\", \"us\": " + us(end - begin) +
         ", \"warps\": " + number(warps) + ", \"instructions\": " + number(instructions) +
         ", \"most_instructions\": " + number(most) + ", \"lane_instructions\": " + number(lanes) +
         ", \"first\": " + warp(*first) + ", \"last\": " + warp(*last) + ", \"atomics\": [" +
         atomics + "], \"calls\": [" + calls + "]}";
}

}  // namespace ptx_machine
