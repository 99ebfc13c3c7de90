// For targets that only have precompiled headers.
