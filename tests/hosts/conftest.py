import os
import sys

# What tests of collectors over networks have in common.
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "distributed"))
