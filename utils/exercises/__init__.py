"""What an answer must satisfy and the faults it can name, one module a lesson."""
