"""The part of autoprof that works in each process of a run: it joins the run and writes the run directory."""
