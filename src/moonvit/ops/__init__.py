"""Pure operations on patches; nothing here knows a family, a file or a module.

Shape letters: N patches of all pictures in a batch, L patches of one picture, D width, H heads,
d head size, P = d/2 rotary pairs, M merged rows.
"""
