// What a program of many mutants is chosen with: see cmake/mutants.py.
#pragma once

// The number of $UEC_MUTANT, 0 without. Constant, so that no sanitizer watches who reads it.
extern const int uec_mutant;

// What is computed while compiling is as no mutant has it.
#define UEC_MUTANT(number) (!__builtin_is_constant_evaluated() && uec_mutant == (number))
