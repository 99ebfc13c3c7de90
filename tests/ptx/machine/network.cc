// NVSHMEM's device functions, as its specification has them: puts and signals arrive late and in
// any order, unless a fence or a wait is between; their sources stay as they are until then. What a
// network card has written is ordered by NVSHMEM's own wait, not by an acquire of its flag.
#include <algorithm>

#include "machine.hpp"

namespace ptx_machine {
namespace {

constexpr uint64_t kSignalSet = 9, kCompareGreaterEqual = 3;  // as nvshmem.h beside this file has

}  // namespace

const Machine::NetworkFunction* Machine::network_function(const std::string& name) {
  static const std::map<std::string, NetworkFunction> functions{
      {"nvshmemx_putmem_nbi_warp", {&Machine::net_put, true}},
      {"nvshmemx_putmem_signal_nbi_warp", {&Machine::net_put, true}},
      {"nvshmemx_signal_op", {&Machine::net_signal, false}},
      {"nvshmem_fence", {&Machine::net_fence, false}},
      {"nvshmem_quiet", {&Machine::net_quiet, false}},
      {"nvshmem_signal_wait_until", {&Machine::net_wait_until, false}}};
  const auto it = functions.find(name);
  return it == functions.end() ? nullptr : &it->second;
}

uint64_t Machine::argument(const NetworkCall& c, int lane, size_t k) const {
  const auto& formals = module_.functions[c.i.target].formals;
  uint64_t v = 0;
  std::memcpy(&v, c.f.area.data() + lane * c.f.area_stride + c.i.args[k], formals[k].second);
  return v;
}

void Machine::give_back(const NetworkCall& c, int lane, uint64_t v) const {
  if (c.i.returns_at < 0) return;
  const int32_t bytes = module_.functions[c.i.target].returned_bytes;
  std::memcpy(c.f.area.data() + lane * c.f.area_stride + c.i.returns_at, &v, bytes);
}

// What `address`, in any rank's symmetric memory, is called on a peer.
uint8_t* Machine::symmetric(const NetworkCall& c, uint64_t address, uint64_t pe) const {
  if (pe >= symmetric_.size()) trap("there is no such PE: " + where(c.pc));
  for (uint8_t* const base : symmetric_) {
    const auto begin = reinterpret_cast<uint64_t>(base);
    if (address >= begin && address < begin + symmetric_bytes_)
      return symmetric_[pe] + (address - begin);
  }
  trap("memory that is not symmetric: " + where(c.pc));
}

// Of a whole warp, with or without a signal behind it.
void Machine::net_put(const NetworkCall& c) {
  const int lane = std::countr_zero(c.lanes);
  const bool signals = c.i.args.size() > 4;
  const uint64_t to = argument(c, lane, 0), from = argument(c, lane, 1);
  const auto bytes = static_cast<uint32_t>(argument(c, lane, 2));
  const uint64_t pe = argument(c, lane, signals ? 6 : 3);
  each_lane(c.lanes, [&](int l) {
    for (size_t k = 0; k < c.i.args.size(); ++k)
      if (argument(c, l, k) != argument(c, lane, k))
        trap("lanes of a warp put different things: " + where(c.pc));
  });
  auto* const source = reinterpret_cast<uint8_t*>(from);
  check_bounds(c.w, lane, source, bytes, c.pc);
  uint8_t* const destination = symmetric(c, to, pe);
  check_bounds(c.w, lane, destination, bytes, c.pc);
  Copy& put = add_copy(Copy::kPut, c.w, lane, source, destination, bytes, c.pc);
  put.pe = pe;
  put.after = fenced_puts(c.w, pe);
  access_by_copy(c.w, lane, from, bytes, false, put, kGeneric);
  access_by_copy(c.w, lane, reinterpret_cast<uint64_t>(destination), bytes, true, put, kGeneric);
  c.w.puts.push_back(put.id);
  if (!signals) return;
  if (argument(c, lane, 5) != kSignalSet) trap("a signal that is not modelled: " + where(c.pc));
  const uint64_t id = put.id;
  Copy& signal = send_signal(c, lane, argument(c, lane, 3), argument(c, lane, 4), pe);
  signal.after.push_back(id);
}

void Machine::net_signal(const NetworkCall& c) {
  each_lane(c.lanes, [&](int l) {
    if (argument(c, l, 2) != kSignalSet) trap("a signal that is not modelled: " + where(c.pc));
    send_signal(c, l, argument(c, l, 0), argument(c, l, 1), argument(c, l, 3));
  });
}

Copy& Machine::send_signal(const NetworkCall& c, int lane, uint64_t flag, uint64_t v, uint64_t pe) {
  uint8_t* const to = symmetric(c, flag, pe);
  Copy& signal = add_copy(Copy::kSignal, c.w, lane, nullptr, to, 8, c.pc);
  std::memcpy(signal.buffer.data(), &v, 8);
  signal.read = true;
  signal.pe = pe;
  signal.after = fenced_puts(c.w, pe);
  retire_all(c.w, lane);
  access(c.w, lane, reinterpret_cast<uint64_t>(to), 8, true,
         Access::how_of(Order::kRelaxed, Scope::kSystem), c.pc, false);
  signal.known = publish(c.w, lane);
  c.w.puts.push_back(signal.id);
  return signal;
}

std::vector<uint64_t> Machine::fenced_puts(const Warp& w, uint64_t pe) {
  std::vector<uint64_t> before;
  for (size_t k = 0; k < w.fenced_puts; ++k)
    if (copy(w.puts[k]).pe == pe) before.push_back(w.puts[k]);
  return before;
}

void Machine::net_fence(const NetworkCall& c) { c.w.fenced_puts = c.w.puts.size(); }

void Machine::net_quiet(const NetworkCall& c) {
  each_lane(c.lanes, [&](int l) {
    c.w.status[l] = Status::kAtQuiet;
    c.w.pc[l] = c.pc;
  });
}

// Whether all of a warp's puts and signals have arrived, as one of its lanes asks.
bool Machine::is_quiet(Warp& w, int lane) {
  for (const uint64_t id : w.puts)
    if (!copy(id).written) return false;
  const Moment now = w.moment(lane);
  for (const uint64_t id : w.puts) {
    copy(id).read_seen.push_back(now);
    copy(id).write_seen.push_back(now);
  }
  bool others = false;
  for (int l = 0; l < 32; ++l) others |= l != lane && w.status[l] == Status::kAtQuiet;
  if (!others) {
    w.puts.clear();
    w.fenced_puts = 0;
  }
  return true;
}

void Machine::net_wait_until(const NetworkCall& c) {
  each_lane(c.lanes, [&](int l) {
    const uint64_t flag = argument(c, l, 0), least = argument(c, l, 2);
    uint64_t seen;
    std::memcpy(&seen, reinterpret_cast<const void*>(flag), 8);
    if (argument(c, l, 1) != kCompareGreaterEqual || seen < least)
      trap("a wait that is not modelled: " + where(c.pc));
    give_back(c, l, seen);
    access(c.w, l, flag, 8, false, Access::how_of(Order::kAcquire, Scope::kSystem), c.pc, false);
    const auto it = signals_.find(flag);
    if (it == signals_.end()) return;
    const Copy& signal = copy(it->second);
    join(c.w, l, signal.known, true);
    for (const uint64_t id : signal.after) copy(id).write_seen.push_back(c.w.moment(l));
  });
}

void Machine::arrive(Copy& c) {
  if (c.form != Copy::kSignal) return;
  const auto flag = reinterpret_cast<uint64_t>(c.destination);
  releases_.erase(flag);  // an acquire of the flag tells nothing
  signals_[flag] = c.id;
}

}  // namespace ptx_machine
