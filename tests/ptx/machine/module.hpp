// PTX as nvcc writes it: functions, typed registers, parameters, labels, and where in the source an
// instruction is from.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ptx_machine {

enum class Type : uint8_t {
  kNone,
  kB8,
  kB16,
  kB32,
  kB64,
  kU8,
  kU16,
  kU32,
  kU64,
  kS8,
  kS16,
  kS32,
  kS64,
  kF32,
  kF64,
  kPred
};
int bytes_of(Type type);
bool is_signed(Type type);
bool is_float(Type type);

enum class Space : uint8_t { kGeneric, kGlobal, kShared, kCluster, kLocal, kParam, kConst };
enum class Order : uint8_t { kWeak, kRelaxed, kAcquire, kRelease, kAcqRel, kSeqCst };
enum class Scope : uint8_t { kNone, kBlock, kCluster, kDevice, kSystem };

enum class Op : uint8_t {
  // Between registers.
  kMov,
  kMovVector,
  kAdd,
  kSub,
  kMulLow,
  kMulHigh,
  kMulWide,
  kMadLow,
  kMadWide,
  kDiv,
  kRem,
  kMin,
  kMax,
  kNeg,
  kAbs,
  kAnd,
  kOr,
  kXor,
  kNot,
  kShl,
  kShr,
  kBitInsert,
  kBitReverse,
  kDotBytes,
  kFindTop,
  kPopCount,
  kLeadingZeros,
  kCompare,
  kSelect,
  kConvert,
  kConvertAddress,
  kMapAddress,
  kBlockOfAddress,
  kActiveMask,
  // Among the lanes of a warp.
  kWarpBarrier,
  kShuffle,
  kRedux,
  kVote,
  kMatch,
  // Memory.
  kLoad,
  kStore,
  kAtomic,
  kReduce,
  kFence,
  kProxyFence,
  kMbarrierFence,
  kMbarrierInit,
  kMbarrierArrive,
  kMbarrierExpect,
  kMbarrierTest,
  kBulkLoad,
  kBulkStore,
  kBulkCopyShared,
  kBulkCommit,
  kBulkWait,
  // Control.
  kBranch,
  kCall,
  kReturn,
  kExit,
  kTrap,
  kBlockBarrier,
  kClusterArrive,
  kClusterWait,
  kSleep
};

enum class Kind : uint8_t {
  kNone,
  kRegister,
  kPredicate,
  kImmediate,
  kSpecial,
  kEntryParam,
  kShared,
  kLocal,
  kArea
};

struct Operand {
  Kind kind = Kind::kNone;
  uint8_t width = 0;  // of a register, bytes
  bool negated = false;
  int32_t index = -1;  // of a register; of a symbol in shared memory, its offset, -1: dynamic
  uint64_t value = 0;  // of an immediate, or which special register; an offset otherwise
};

struct Place {  // in a source file
  int32_t file = 0, line = 0;
};

struct Instruction {
  Op op = Op::kMov;
  Type type = Type::kNone, from = Type::kNone;
  uint8_t count = 1;  // of elements
  Space space = Space::kGeneric;
  Order order = Order::kWeak;
  Scope scope = Scope::kNone;
  uint8_t mode = 0;  // which comparison, operation of an atomic, form of a shuffle
  bool constant = false, to_space = false, read_only = false, multicast = false;
  int32_t predicate = -1;
  bool unless = false;  // the predicate is negated
  Operand to[4], from_operand[6];
  int32_t num_to = 0, num_from = 0;
  Operand base;  // of an address
  int64_t offset = 0;
  bool has_address = false;
  int32_t target = -1;  // of a branch; the function of a call
  std::string callee;
  std::vector<int32_t> args;  // offsets in the caller's area
  int32_t returns_at = -1;
  uint32_t used_bytes = ~0u;  // of a load
  int32_t line = 0;           // of the PTX
  Place source, caller;       // `caller`: of the function that was inlined here
};

enum Comparison : uint8_t { kEq, kNe, kLt, kLe, kGt, kGe };
enum Atomic : uint8_t {
  kAtomicAdd,
  kAtomicCas,
  kAtomicExchange,
  kAtomicMin,
  kAtomicMax,
  kAtomicAnd,
  kAtomicOr,
  kAtomicXor
};
enum Shuffle : uint8_t { kShuffleIndex, kShuffleUp, kShuffleDown, kShuffleXor };
enum Vote : uint8_t { kBallot, kAny, kAll, kUniform };
enum Special : uint8_t {
  kZero,
  kOne,
  kThread,
  kThreads,
  kBlockX,
  kBlockY,
  kBlocksX,
  kBlocksY,
  kLane,
  kWarp,
  kGlobalTimer,
  kClock,
  kLanesBelow,
  kProcessor,
  kClusterRank,
  kClusterBlocks,
  kClusterX
};

struct Function {
  std::string name;
  bool is_entry = false, has_body = false;
  int32_t begin = 0, end = 0;
  int32_t num_registers = 0, num_predicates = 0;
  int32_t area_bytes = 0;  // formals, the returned value, and what its calls pass
  std::vector<std::pair<int32_t, int32_t>> formals;  // offset, bytes
  int32_t returns_at = -1, returned_bytes = 0;
  int32_t local_bytes = 0;
  int32_t entry_bytes = 0;
  std::vector<std::pair<int32_t, int32_t>> entry_params;  // offset, bytes
  int32_t cluster_blocks = 1;
};

struct Module {
  std::vector<Function> functions;
  std::map<std::string, int32_t> index;  // by name
  std::vector<Instruction> code;
  std::map<std::string, std::unique_ptr<std::vector<uint8_t>>> globals;
  int64_t static_shared = 0;  // bytes in front of dynamic shared memory
  std::map<int32_t, std::string> files;

  int64_t dynamic_shared_at() const { return (static_shared + 127) / 128 * 128; }
  const Function* function_at(int32_t pc) const;
  std::string where(int32_t pc) const;  // function, line of the PTX, lines of the source
};

// Ends the program with status 2 and the line, if the file is not there or has what is not
// modelled.
Module parse(const std::string& path);

}  // namespace ptx_machine
