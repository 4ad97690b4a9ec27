"""The figures of Kwon et al. (SOSP 2023): what bench/paper.py computes, measures and writes, a function for each."""
