// For targets that have nothing but precompiled headers.
