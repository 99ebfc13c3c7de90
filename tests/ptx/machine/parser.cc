#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "module.hpp"

namespace ptx_machine {
namespace {

struct Symbol {
  enum Where { kRegister, kPredicate, kEntryParam, kArea, kLocal, kShared, kGlobal } where;
  int32_t at = 0;
  int32_t bytes = 0;
};

Type type_of(const std::string& word) {
  static const std::map<std::string, Type> types{
      {"b8", Type::kB8},   {"b16", Type::kB16}, {"b32", Type::kB32},  {"b64", Type::kB64},
      {"u8", Type::kU8},   {"u16", Type::kU16}, {"u32", Type::kU32},  {"u64", Type::kU64},
      {"s8", Type::kS8},   {"s16", Type::kS16}, {"s32", Type::kS32},  {"s64", Type::kS64},
      {"f32", Type::kF32}, {"f64", Type::kF64}, {"pred", Type::kPred}};
  const auto it = types.find(word);
  return it == types.end() ? Type::kNone : it->second;
}

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%';
}
int32_t round_up(int32_t value, int32_t to) { return to <= 1 ? value : (value + to - 1) / to * to; }

std::string trim(const std::string& text) {
  size_t begin = 0, end = text.size();
  while (begin < end && is_space(text[begin])) ++begin;
  while (end > begin && is_space(text[end - 1])) --end;
  return text.substr(begin, end - begin);
}

std::string without_brackets(const std::string& text) {
  return trim(text.substr(1, text.size() - 2));
}

// At commas outside of brackets.
std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (const char c : text) {
    if (c == '{' || c == '[' || c == '(') ++depth;
    if (c == '}' || c == ']' || c == ')') --depth;
    if (c == ',' && depth == 0) {
      parts.push_back(trim(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!trim(part).empty()) parts.push_back(trim(part));
  return parts;
}

bool parse_number(const std::string& text, uint64_t* value) {
  size_t at = text.empty() || text[0] != '-' ? 0 : 1;
  if (at >= text.size()) return false;
  if (text[at] == '0' && at + 1 < text.size() && std::strchr("fFdD", text[at + 1]) != nullptr) {
    *value = std::strtoull(text.c_str() + at + 2, nullptr, 16);  // the bits of a float
    return true;
  }
  if (std::isdigit(static_cast<unsigned char>(text[at])) == 0) return false;
  *value = std::strtoull(text.c_str() + at, nullptr, 0);
  if (at == 1) *value = -*value;
  return true;
}

bool parse_special(const std::string& text, uint64_t* value) {
  static const std::map<std::string, Special> registers{{"%tid.x", kThread},
                                                        {"%tid.y", kZero},
                                                        {"%tid.z", kZero},
                                                        {"%ntid.x", kThreads},
                                                        {"%ntid.y", kOne},
                                                        {"%ntid.z", kOne},
                                                        {"%ctaid.x", kBlockX},
                                                        {"%ctaid.y", kBlockY},
                                                        {"%ctaid.z", kZero},
                                                        {"%nctaid.x", kBlocksX},
                                                        {"%nctaid.y", kBlocksY},
                                                        {"%nctaid.z", kOne},
                                                        {"%laneid", kLane},
                                                        {"%warpid", kWarp},
                                                        {"%globaltimer", kGlobalTimer},
                                                        {"%clock", kClock},
                                                        {"%clock64", kClock},
                                                        {"%lanemask_lt", kLanesBelow},
                                                        {"%smid", kProcessor},
                                                        {"%cluster_ctarank", kClusterRank},
                                                        {"%cluster_nctarank", kClusterBlocks},
                                                        {"%cluster_ctaid.x", kClusterRank},
                                                        {"%cluster_nctaid.x", kClusterBlocks},
                                                        {"%clusterid.x", kClusterX}};
  const auto it = registers.find(text);
  if (it == registers.end()) return false;
  *value = it->second;
  return true;
}

// An instruction's words between dots, and its operands.
struct Statement {
  std::vector<std::string> words;
  std::vector<std::string> operands;
  std::string text;

  bool has(const char* word) const {
    return std::find(words.begin(), words.end(), word) != words.end();
  }
};

class Parser {
 public:
  Parser(std::string text, std::string path) : text_(std::move(text)), path_(std::move(path)) {}

  Module run() {
    for (skip_blank(); at_ < text_.size(); skip_blank()) top_level();
    for (Instruction& i : module_.code)
      if (i.op == Op::kCall) {
        const auto it = module_.index.find(i.callee);
        i.target = it == module_.index.end() ? -1 : it->second;
      }
    return std::move(module_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    std::fprintf(stderr, "%s:%d: %s\n", path_.c_str(), line_, what.c_str());
    std::exit(2);
  }

  // ---- text

  void skip_line() {
    while (at_ < text_.size() && text_[at_] != '\n') ++at_;
  }
  void skip_blank() {
    while (at_ < text_.size()) {
      if (text_[at_] == '\n') ++line_;
      if (is_space(text_[at_]))
        ++at_;
      else if (text_.compare(at_, 2, "//") == 0)
        skip_line();
      else
        break;
    }
  }
  std::string rest_of_line() {
    const size_t begin = at_;
    skip_line();
    return text_.substr(begin, at_ - begin);
  }
  std::string word() {
    skip_blank();
    const size_t begin = at_;
    if (at_ < text_.size() && text_[at_] == '.') ++at_;
    while (at_ < text_.size() && is_word(text_[at_])) ++at_;
    if (at_ == begin) fail("a word is expected at '" + text_.substr(at_, 20) + "'");
    return text_.substr(begin, at_ - begin);
  }
  bool accept(char c) {
    skip_blank();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) fail(std::string("'") + c + "' is expected at '" + text_.substr(at_, 20) + "'");
  }
  std::string until(char end) {
    const size_t begin = at_;
    for (; at_ < text_.size() && text_[at_] != end; ++at_) line_ += text_[at_] == '\n';
    if (at_ >= text_.size()) fail(std::string("'") + end + "' is missing");
    return text_.substr(begin, at_++ - begin);
  }
  // Without comments.
  static std::string code_of(const std::string& text) {
    std::string code;
    for (size_t at = 0; at < text.size(); ++at) {
      if (text.compare(at, 2, "//") == 0) at = std::min(text.find('\n', at), text.size() - 1);
      code += is_space(text[at]) ? ' ' : text[at];
    }
    return trim(code);
  }

  // ---- directives

  bool directive(const std::string& name) {
    static const char* const ignored[] = {
        ".version", ".target",  ".address_size",   ".maxnreg",         ".minnctapersm",
        ".maxntid", ".reqntid", ".maxclusterrank", ".explicitcluster", ".noreturn"};
    if (std::find(std::begin(ignored), std::end(ignored), name) != std::end(ignored)) {
      skip_line();
    } else if (name == ".reqnctapercluster") {
      function_.cluster_blocks = std::atoi(rest_of_line().c_str());
    } else if (name == ".file") {
      std::istringstream in(rest_of_line());
      int32_t number = 0;
      in >> number;
      std::string file;
      std::getline(in, file, '"');
      std::getline(in, file, '"');
      module_.files[number] = file;
    } else if (name == ".loc") {
      const std::string line = rest_of_line();
      std::sscanf(line.c_str(), "%d %d", &source_.file, &source_.line);
      caller_ = {};
      const size_t inlined = line.find("inlined_at");
      if (inlined != std::string::npos)
        std::sscanf(line.c_str() + inlined, "inlined_at %d %d", &caller_.file, &caller_.line);
    } else if (name == ".section") {
      until('{');
      until('}');
    } else if (name == ".pragma") {
      const std::string pragma = until(';');
      const std::string mask = "used_bytes_mask";
      const size_t at = pragma.find(mask);
      if (at != std::string::npos)
        used_bytes_ =
            static_cast<uint32_t>(std::strtoul(pragma.c_str() + at + mask.size(), nullptr, 0));
    } else {
      return false;
    }
    return true;
  }

  void top_level() {
    std::string name = word();
    if (directive(name)) return;
    while (name == ".visible" || name == ".weak" || name == ".extern" || name == ".common")
      name = word();
    if (name == ".entry" || name == ".func") return function(name == ".entry");
    if (name == ".global" || name == ".const" || name == ".shared") return variable(name);
    fail("unknown directive " + name);
  }

  struct Declaration {
    Type type = Type::kNone;
    int32_t align = 0, bytes = 0;
    std::string name;
  };
  // After .param, .global, ...: [.align n] .type name[size]
  Declaration declaration() {
    Declaration d;
    while (d.name.empty()) {
      const std::string next = word();
      if (next == ".align")
        d.align = std::atoi(word().c_str());
      else if (next == ".ptr" || next == ".global")
        continue;
      else if (next[0] == '.')
        d.type = type_of(next.substr(1));
      else
        d.name = next;
    }
    d.bytes = bytes_of(d.type);
    if (d.align == 0) d.align = d.bytes;
    if (accept('[')) {
      if (accept(']')) {
        d.bytes = 0;  // as much as the launch asks for
      } else {
        d.bytes *= std::atoi(word().c_str());
        expect(']');
      }
    }
    return d;
  }

  void variable(const std::string& space) {
    const Declaration d = declaration();
    std::string value = code_of(until(';'));
    if (space == ".shared") return shared(d);
    auto memory = std::make_unique<std::vector<uint8_t>>(d.bytes + 64);
    if (!value.empty()) {
      value = trim(value.substr(1));
      const int32_t element = bytes_of(d.type);
      size_t at = 0;
      for (const std::string& part :
           value[0] == '{' ? split(without_brackets(value)) : std::vector<std::string>{value}) {
        uint64_t number = 0;
        if (!parse_number(part, &number)) fail("an initial value that is not modelled: " + part);
        std::memcpy(memory->data() + at, &number, element);
        at += element;
      }
    }
    module_.globals[d.name] = std::move(memory);
    symbols_[0][d.name] = {Symbol::kGlobal, 0, d.bytes};
  }

  void shared(const Declaration& d) {
    if (d.bytes == 0) {
      symbols_.back()[d.name] = {Symbol::kShared, -1, 0};
      return;
    }
    const auto at = round_up(static_cast<int32_t>(module_.static_shared), d.align);
    module_.static_shared = at + d.bytes;
    symbols_.back()[d.name] = {Symbol::kShared, at, d.bytes};
  }

  // ---- functions

  int32_t area(const Declaration& d) {
    const int32_t at = round_up(function_.area_bytes, d.align);
    symbols_.back()[d.name] = {Symbol::kArea, at, d.bytes};
    function_.area_bytes = at + d.bytes;
    return at;
  }

  void function(bool is_entry) {
    function_ = {};
    function_.is_entry = is_entry;
    symbols_.resize(1);
    symbols_.emplace_back();
    if (!is_entry && accept('(')) {
      word();  // .param
      const Declaration d = declaration();
      expect(')');
      function_.returns_at = area(d);
      function_.returned_bytes = d.bytes;
    }
    function_.name = word();
    if (accept('(')) {
      while (!accept(')')) {
        accept(',');
        word();  // .param
        const Declaration d = declaration();
        if (is_entry) {
          const int32_t at = round_up(function_.entry_bytes, d.align);
          symbols_.back()[d.name] = {Symbol::kEntryParam, at, d.bytes};
          function_.entry_bytes = at + d.bytes;
          function_.entry_params.push_back({at, d.bytes});
        } else {
          const int32_t at = area(d);
          function_.formals.push_back({at, d.bytes});
        }
      }
    }
    for (;;) {
      if (accept(';')) {  // without a body: of another module, or to come
        symbols_.resize(1);
        return declare();
      }
      if (accept('{')) break;
      const std::string name = word();
      if (!directive(name)) fail("unknown directive " + name);
    }
    function_.has_body = true;
    function_.begin = static_cast<int32_t>(module_.code.size());
    declare();  // calls itself, maybe
    body();
    function_.area_bytes = round_up(function_.area_bytes, 16);
    function_.end = static_cast<int32_t>(module_.code.size());
    Instruction last;
    last.op = Op::kReturn;
    last.line = line_;
    module_.code.push_back(last);
    for (const auto& [pc, label] : branches_) {
      const auto it = labels_.find(label);
      if (it == labels_.end()) fail("no label " + label);
      module_.code[pc].target = it->second;
    }
    branches_.clear();
    labels_.clear();
    declare();
    symbols_.resize(1);
  }

  void declare() {
    const auto [it, is_new] =
        module_.index.try_emplace(function_.name, static_cast<int32_t>(module_.functions.size()));
    if (is_new)
      module_.functions.push_back(function_);
    else if (function_.has_body)
      module_.functions[it->second] = function_;
  }

  void body() {
    for (int depth = 1; depth > 0;) {
      if (accept('{')) {
        ++depth;
        symbols_.emplace_back();
      } else if (accept('}')) {
        --depth;
        symbols_.pop_back();
      } else if (accept(';')) {
        continue;
      } else if (text_[at_] == '.') {
        const std::string name = word();
        if (name == ".reg")
          registers();
        else if (name == ".param" || name == ".local" || name == ".shared")
          memory_of_function(name);
        else if (!directive(name))
          fail("unknown directive " + name);
      } else {
        statement();
      }
    }
  }

  void memory_of_function(const std::string& space) {
    const Declaration d = declaration();
    until(';');
    if (space == ".param") {
      area(d);
    } else if (space == ".local") {
      function_.local_bytes = round_up(function_.local_bytes, 16);
      symbols_.back()[d.name] = {Symbol::kLocal, function_.local_bytes, d.bytes};
      function_.local_bytes += d.bytes;
    } else {
      shared(d);
    }
  }

  void registers() {
    const Type type = type_of(word().substr(1));
    do {
      const std::string name = word();
      int32_t count = 1;
      const bool is_family = accept('<');
      if (is_family) {
        count = std::atoi(word().c_str());
        expect('>');
      }
      for (int32_t i = 0; i < count; ++i) {
        const std::string one = is_family ? name + std::to_string(i) : name;
        if (type == Type::kPred)
          symbols_.back()[one] = {Symbol::kPredicate, function_.num_predicates++, 0};
        else
          symbols_.back()[one] = {Symbol::kRegister, function_.num_registers++, bytes_of(type)};
      }
    } while (accept(','));
    expect(';');
  }

  // ---- operands

  const Symbol& find(const std::string& name) const {
    for (size_t i = symbols_.size(); i-- > 0;) {
      const auto it = symbols_[i].find(name);
      if (it != symbols_[i].end()) return it->second;
    }
    fail("unknown name " + name);
  }

  Operand operand(std::string text) const {
    Operand o;
    if (text[0] == '!') {
      o.negated = true;
      text.erase(0, 1);
    }
    if (text == "WARP_SZ") text = "32";
    if (text == "_") return o;
    if (parse_number(text, &o.value)) {
      o.kind = Kind::kImmediate;
      return o;
    }
    if (parse_special(text, &o.value)) {
      o.kind = Kind::kSpecial;
      return o;
    }
    const size_t plus = text.find('+');
    const std::string name = text.substr(0, plus);
    const int64_t offset =
        plus == std::string::npos ? 0 : std::strtoll(text.c_str() + plus + 1, nullptr, 0);
    const Symbol& symbol = find(name);
    o.index = symbol.at;
    o.value = static_cast<uint64_t>(offset);
    switch (symbol.where) {
      case Symbol::kRegister:
        o.kind = Kind::kRegister;
        o.width = static_cast<uint8_t>(symbol.bytes);
        break;
      case Symbol::kPredicate:
        o.kind = Kind::kPredicate;
        break;
      case Symbol::kEntryParam:
        o.kind = Kind::kEntryParam;
        o.value += symbol.at;
        break;
      case Symbol::kArea:
        o.kind = Kind::kArea;
        o.value += symbol.at;
        break;
      case Symbol::kLocal:
        o.kind = Kind::kLocal;
        o.value += symbol.at;
        break;
      case Symbol::kShared:
        o.kind = Kind::kShared;
        break;
      case Symbol::kGlobal:
        o.kind = Kind::kImmediate;
        o.value += reinterpret_cast<uint64_t>(module_.globals.at(name)->data());
        break;
    }
    return o;
  }

  void address(Instruction& i, const std::string& text) const {
    if (text.front() != '[' || text.back() != ']') fail("an address is expected: " + text);
    const std::string inner = without_brackets(text);
    size_t sign = inner.find('+');
    if (sign == std::string::npos) sign = inner.find('-', 1);
    if (sign != std::string::npos)
      i.offset = std::strtoll(inner.c_str() + sign + (inner[sign] == '+' ? 1 : 0), nullptr, 0);
    i.base = operand(trim(inner.substr(0, sign)));
    i.has_address = true;
  }

  void take(Instruction& i, const std::string& text) const {
    if (i.num_from == 6) fail("too many operands");
    i.from_operand[i.num_from++] = operand(text.front() == '[' ? without_brackets(text) : text);
  }
  void give(Instruction& i, const std::string& text) const {
    if (i.num_to == 4) fail("too many operands");
    i.to[i.num_to++] = operand(text);
  }
  static std::vector<std::string> elements(const std::string& text) {
    return text.front() == '{' ? split(without_brackets(text)) : std::vector<std::string>{text};
  }

  // ---- statements

  void statement() {
    const int32_t line = line_;
    skip_blank();
    // A label is followed by anything.
    size_t end = at_;
    while (end < text_.size() && is_word(text_[end])) ++end;
    if (end > at_ && text_[end] == ':' && text_[end + 1] != ':') {
      labels_[text_.substr(at_, end - at_)] = static_cast<int32_t>(module_.code.size());
      at_ = end + 1;
      return;
    }
    std::string text = code_of(until(';'));
    if (text.empty()) return;
    Instruction i;
    i.line = line;
    i.source = source_;
    i.caller = caller_;
    i.used_bytes = used_bytes_;
    used_bytes_ = ~0u;
    if (text[0] == '@') {
      const size_t name = text[1] == '!' ? 2 : 1;
      i.unless = name == 2;
      const size_t blank = text.find(' ');
      i.predicate = operand(text.substr(name, blank - name)).index;
      text = trim(text.substr(blank));
    }
    Statement s;
    s.text = text;
    const size_t blank = std::min(text.find(' '), text.size());
    std::istringstream words(text.substr(0, blank));
    for (std::string part; std::getline(words, part, '.');) s.words.push_back(part);
    s.operands = split(trim(text.substr(blank)));
    decode(i, s);
    module_.code.push_back(std::move(i));
  }

  static void qualify(Instruction& i, const Statement& s) {
    i.scope = s.has("sys")       ? Scope::kSystem
              : s.has("gpu")     ? Scope::kDevice
              : s.has("cluster") ? Scope::kCluster
              : s.has("cta")     ? Scope::kBlock
                                 : Scope::kNone;
    i.order = s.has("acquire")   ? Order::kAcquire
              : s.has("release") ? Order::kRelease
              : s.has("acq_rel") ? Order::kAcqRel
              : s.has("relaxed") ? Order::kRelaxed
              : s.has("sc")      ? Order::kSeqCst
                                 : Order::kWeak;
    i.space = s.has("global")                           ? Space::kGlobal
              : s.has("shared") || s.has("shared::cta") ? Space::kShared
              : s.has("shared::cluster")                ? Space::kCluster
              : s.has("local")                          ? Space::kLocal
              : s.has("param")                          ? Space::kParam
              : s.has("const")                          ? Space::kConst
                                                        : Space::kGeneric;
    if (s.has("volatile")) {
      i.order = Order::kRelaxed;
      i.scope = Scope::kSystem;
    }
    i.constant = s.has("nc");
    i.count = s.has("v2") ? 2 : s.has("v4") ? 4 : 1;
  }

  // Whose name is one word and whose operands are a register and what it is made of.
  static const std::map<std::string, Op>& simple() {
    static const std::map<std::string, Op> ops{
        {"add", Op::kAdd},         {"sub", Op::kSub},
        {"div", Op::kDiv},         {"rem", Op::kRem},
        {"min", Op::kMin},         {"max", Op::kMax},
        {"neg", Op::kNeg},         {"abs", Op::kAbs},
        {"and", Op::kAnd},         {"or", Op::kOr},
        {"xor", Op::kXor},         {"not", Op::kNot},
        {"shl", Op::kShl},         {"shr", Op::kShr},
        {"bfi", Op::kBitInsert},   {"brev", Op::kBitReverse},
        {"popc", Op::kPopCount},   {"clz", Op::kLeadingZeros},
        {"selp", Op::kSelect},     {"dp4a", Op::kDotBytes},
        {"cvt", Op::kConvert},     {"activemask", Op::kActiveMask},
        {"mapa", Op::kMapAddress}, {"getctarank", Op::kBlockOfAddress}};
    return ops;
  }

  void decode(Instruction& i, const Statement& s) {
    for (const std::string& w : s.words) {
      const Type type = type_of(w);
      if (type == Type::kNone) continue;
      (i.type == Type::kNone ? i.type : i.from) = type;
    }
    const std::string& name = s.words[0];
    const auto& of = s.operands;
    const auto compute = [&](Op op) {
      i.op = op;
      for (const std::string& part : elements(of[0])) give(i, part);
      for (size_t k = 1; k < of.size(); ++k)
        for (const std::string& part : elements(of[k])) take(i, part);
    };
    if (const auto it = simple().find(name); it != simple().end()) {
      if (s.has("sat") || s.has("cc")) fail("not modelled: " + s.text);
      if (name == "mapa" || name == "getctarank") qualify(i, s);
      return compute(it->second);
    }
    if (name == "mov")
      return compute(of[0].front() == '{' || of[1].front() == '{' ? Op::kMovVector : Op::kMov);
    if (name == "createpolicy") {  // a hint: of no effect here
      i.op = Op::kMov;
      give(i, of[0]);
      return take(i, "0");
    }
    if (name == "mul")
      return compute(s.has("wide") ? Op::kMulWide : s.has("hi") ? Op::kMulHigh : Op::kMulLow);
    if (name == "mad" && !s.has("hi")) return compute(s.has("wide") ? Op::kMadWide : Op::kMadLow);
    if (name == "bfind") {
      i.mode = s.has("shiftamt");
      return compute(Op::kFindTop);
    }
    if (name == "setp" && !s.has("and") && !s.has("or") && !s.has("xor")) {
      static const std::map<std::string, Comparison> comparisons{
          {"eq", kEq}, {"ne", kNe}, {"lt", kLt}, {"le", kLe}, {"gt", kGt},
          {"ge", kGe}, {"lo", kLt}, {"ls", kLe}, {"hi", kGt}, {"hs", kGe}};
      const auto it = comparisons.find(s.words[1]);
      if (it != comparisons.end()) {
        i.mode = it->second;
        return compute(Op::kCompare);
      }
    }
    if (name == "cvta") {
      qualify(i, s);
      i.to_space = s.has("to");
      return compute(Op::kConvertAddress);
    }
    if (name == "bra") {
      i.op = Op::kBranch;
      branches_.push_back({static_cast<int32_t>(module_.code.size()), of[0]});
      return;
    }
    if (name == "ret" || name == "exit" || name == "trap") {
      i.op = name == "ret" ? Op::kReturn : name == "exit" ? Op::kExit : Op::kTrap;
      return;
    }
    if (name == "call") return decode_call(i, of);
    if (name == "nanosleep") {
      i.op = Op::kSleep;
      return take(i, of[0]);
    }
    if (!decode_warp(i, s, compute) && !decode_memory(i, s) && !decode_async(i, s))
      fail("not modelled: " + s.text);
  }

  void decode_call(Instruction& i, const std::vector<std::string>& of) {
    i.op = Op::kCall;
    size_t k = 0;
    if (of[0].front() == '(')
      i.returns_at = static_cast<int32_t>(operand(without_brackets(of[k++])).value);
    i.callee = of[k++];
    if (k < of.size())
      for (const std::string& arg : split(without_brackets(of[k])))
        i.args.push_back(static_cast<int32_t>(operand(arg).value));
  }

  template <class Compute>
  bool decode_warp(Instruction& i, const Statement& s, const Compute& compute) {
    const std::string& name = s.words[0];
    if (name == "shfl") {
      i.op = Op::kShuffle;
      i.mode = s.has("idx")    ? kShuffleIndex
               : s.has("up")   ? kShuffleUp
               : s.has("down") ? kShuffleDown
                               : kShuffleXor;
      const size_t bar = s.operands[0].find('|');
      give(i, s.operands[0].substr(0, bar));
      if (bar != std::string::npos) give(i, s.operands[0].substr(bar + 1));
      for (size_t k = 1; k < s.operands.size(); ++k) take(i, s.operands[k]);
    } else if (name == "redux") {
      i.mode = atomic_of(s);
      compute(Op::kRedux);
    } else if (name == "vote") {
      i.mode = s.has("ballot") ? kBallot : s.has("any") ? kAny : s.has("all") ? kAll : kUniform;
      compute(Op::kVote);
    } else if (name == "match" && s.has("any")) {
      compute(Op::kMatch);
    } else if ((name == "bar" || name == "barrier") && s.has("cluster")) {
      i.op = s.has("arrive") ? Op::kClusterArrive : Op::kClusterWait;
      qualify(i, s);
    } else if ((name == "bar" || name == "barrier") && s.has("warp")) {
      i.op = Op::kWarpBarrier;
      take(i, s.operands[0]);
    } else if ((name == "bar" || name == "barrier") && s.has("sync") && s.operands.size() == 1 &&
               s.operands[0] == "0") {
      i.op = Op::kBlockBarrier;
    } else {
      return false;
    }
    return true;
  }

  static Atomic atomic_of(const Statement& s) {
    return s.has("add")    ? kAtomicAdd
           : s.has("cas")  ? kAtomicCas
           : s.has("exch") ? kAtomicExchange
           : s.has("min")  ? kAtomicMin
           : s.has("max")  ? kAtomicMax
           : s.has("and")  ? kAtomicAnd
           : s.has("or")   ? kAtomicOr
                           : kAtomicXor;
  }

  bool decode_memory(Instruction& i, const Statement& s) {
    const std::string& name = s.words[0];
    const auto& of = s.operands;
    qualify(i, s);
    if (name == "ld" || name == "ldu") {
      i.op = Op::kLoad;
      for (const std::string& part : elements(of[0])) give(i, part);
      address(i, of[1]);
    } else if (name == "st") {
      i.op = Op::kStore;
      address(i, of[0]);
      for (const std::string& part : elements(of[1])) take(i, part);
    } else if (name == "atom" || name == "red") {
      i.op = name == "atom" ? Op::kAtomic : Op::kReduce;
      if (i.order == Order::kWeak) i.order = Order::kRelaxed;
      if (i.scope == Scope::kNone) i.scope = Scope::kDevice;
      i.mode = atomic_of(s);
      size_t k = 0;
      if (name == "atom") give(i, of[k++]);
      address(i, of[k++]);
      for (; k < of.size(); ++k) take(i, of[k]);
    } else if (name == "membar") {
      i.op = Op::kFence;
      i.order = Order::kSeqCst;
      i.scope = s.has("sys") ? Scope::kSystem : s.has("gl") ? Scope::kDevice : Scope::kBlock;
    } else if (name == "fence" && s.has("proxy")) {
      if (!s.has("async")) return false;
      i.op = Op::kProxyFence;
      if (i.space == Space::kCluster) i.space = Space::kShared;
    } else if (name == "fence" && s.has("mbarrier_init")) {
      i.op = Op::kMbarrierFence;
    } else if (name == "fence") {
      i.op = Op::kFence;
      if (i.order == Order::kWeak) i.order = Order::kAcqRel;
    } else {
      return false;
    }
    return true;
  }

  bool decode_async(Instruction& i, const Statement& s) {
    const std::string& name = s.words[0];
    const auto& of = s.operands;
    if (name == "mbarrier") {
      i.order = s.has("relaxed") ? Order::kRelaxed : Order::kAcqRel;
      i.scope = s.has("cluster") ? Scope::kCluster : Scope::kBlock;
      if (s.words[1] == "init") {
        i.op = Op::kMbarrierInit;
        address(i, of[0]);
        take(i, of[1]);
      } else if (s.words[1] == "arrive") {
        i.op = s.has("expect_tx") ? Op::kMbarrierExpect : Op::kMbarrierArrive;
        address(i, of[1]);
        if (of.size() > 2) take(i, of[2]);
      } else if ((s.words[1] == "test_wait" || s.words[1] == "try_wait") && s.has("parity")) {
        i.op = Op::kMbarrierTest;
        give(i, of[0]);
        address(i, of[1]);
        take(i, of[2]);
      } else {
        return false;
      }
      return true;
    }
    if (name != "cp" || !s.has("bulk") || s.has("tensor")) return false;
    if (s.has("commit_group")) {
      i.op = Op::kBulkCommit;
      return true;
    }
    if (s.has("wait_group")) {
      i.op = Op::kBulkWait;
      i.read_only = s.has("read");
      take(i, of[0]);
      return true;
    }
    if (s.words.size() < 5) return false;
    const std::string &destination = s.words[3], &source = s.words[4];
    const bool loads = destination == "shared::cluster" || destination == "shared::cta";
    if (loads && source == "global")
      i.op = Op::kBulkLoad;
    else if (destination == "shared::cluster" && source == "shared::cta")
      i.op = Op::kBulkCopyShared;
    else if (destination == "global" && source == "shared::cta")
      i.op = Op::kBulkStore;
    else
      return false;
    i.multicast = s.has("multicast::cluster");
    for (const std::string& part : of) take(i, part);
    return true;
  }

  std::string text_, path_;
  Module module_;
  size_t at_ = 0;
  int32_t line_ = 1;
  Place source_, caller_;
  uint32_t used_bytes_ = ~0u;
  std::vector<std::map<std::string, Symbol>> symbols_ =
      std::vector<std::map<std::string, Symbol>>(1);  // by scope
  Function function_;
  std::map<std::string, int32_t> labels_;
  std::vector<std::pair<int32_t, std::string>> branches_;
};

}  // namespace

int bytes_of(Type type) {
  switch (type) {
    case Type::kB8:
    case Type::kU8:
    case Type::kS8:
      return 1;
    case Type::kB16:
    case Type::kU16:
    case Type::kS16:
      return 2;
    case Type::kB32:
    case Type::kU32:
    case Type::kS32:
    case Type::kF32:
      return 4;
    case Type::kB64:
    case Type::kU64:
    case Type::kS64:
    case Type::kF64:
      return 8;
    default:
      return 0;
  }
}

bool is_signed(Type type) {
  return type == Type::kS8 || type == Type::kS16 || type == Type::kS32 || type == Type::kS64;
}

bool is_float(Type type) { return type == Type::kF32 || type == Type::kF64; }

const Function* Module::function_at(int32_t pc) const {
  for (const Function& f : functions)
    if (f.has_body && pc >= f.begin && pc <= f.end) return &f;
  return nullptr;
}

std::string Module::where(int32_t pc) const {
  const auto show = [&](const Place& place) {
    const auto it = files.find(place.file);
    std::string name = it == files.end() ? "?" : it->second;
    const size_t source = name.rfind("/src/"), slash = name.rfind('/');
    if (source != std::string::npos)
      name = name.substr(source + 1);
    else if (slash != std::string::npos)
      name = name.substr(slash + 1);
    return name + ":" + std::to_string(place.line);
  };
  const Instruction& i = code[pc];
  const Function* const f = function_at(pc);
  std::string text = (f == nullptr ? "?" : f->name.substr(0, 60)) +
                     " ptx:" + std::to_string(i.line) + " " + show(i.source);
  if (i.caller.line != 0) text += " < " + show(i.caller);
  return text;
}

Module parse(const std::string& path) {
  std::ifstream in(path);
  if (!in) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    std::exit(2);
  }
  std::stringstream text;
  text << in.rdbuf();
  return Parser(text.str(), path).run();
}

}  // namespace ptx_machine
