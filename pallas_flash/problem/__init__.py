"""The arguments of a call, and the Problem and Operands that they become."""
