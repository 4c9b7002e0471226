//! nstance-operator.
